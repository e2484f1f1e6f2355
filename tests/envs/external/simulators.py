"""Simulators that connect to a job: python -m tests.envs.external.simulators NAME ADDRESS KEY_FILE STEPS"""

from __future__ import annotations

import sys
import time

import numpy as np

from rlmesh.envs import ExternalEnvClient


def hangs(address: str, key_file: str, steps: int) -> None:
    """Make some steps, say so, and do nothing until killed."""
    with ExternalEnvClient(address, key_file) as client:
        episode = client.start_episode()
        for step in range(steps + 1):
            client.get_action(episode, np.array([step, 0], np.float32))
            if step < steps:
                client.log_returns(episode, 1.0)
        print("hangs", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))

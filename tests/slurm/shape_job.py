"""A job that tells where its members are, what they see, and over which sockets they talk."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy

from rlmesh import BaseWorkload, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.runtime.default_runtime import default_runtime


class Member(BaseWorkload):
    @rpc
    def facts(self) -> dict[str, Any]:
        book = default_runtime().address_book()  # What this member knows of the others.
        endpoints = {member.name: member.endpoint.partition(":")[0] for member in book.members if member.endpoint}
        return {
            "task": os.environ["SLURM_PROCID"],
            "gpus": self._agent_environ().get("CUDA_VISIBLE_DEVICES", ""),
            "slurm_node": os.environ["SLURMD_NODENAME"],
            "node": current_worker().node_name,
            "schemes": endpoints,
            "key": [name for name in os.environ if name == "RLMESH_KEY"],
        }

    def _agent_environ(self) -> dict[str, str]:
        """What Slurm gave to the task: a member of a job on CPUs itself sees no GPU."""
        items = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode().split("\0")
        return dict(item.split("=", 1) for item in items if "=" in item)

    @rpc
    def total(self, array: Any) -> float:
        return float(array.sum())


class Trainer:
    def run(self) -> None:
        members = RoleGroup[Member]("MEMBER")
        assert members.call("total", numpy.ones(1 << 20)).result() == [float(1 << 20)] * len(members)
        facts = members.call("facts").result()
        (current_worker().run_dir / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=3)
    options = parser.parse_args()
    builder = DLJobBuilder().device_type("CPU")
    builder.role("MEMBER").run(Member).total(options.members).per_node(1)
    builder.role("TRAINER").run(Trainer)
    builder.build().submit("shapes")
    sys.exit(0)

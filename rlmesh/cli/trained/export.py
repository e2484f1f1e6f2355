"""``rlmesh export RUN|CHECKPOINT FOLDER``: writes a policy as a plain folder of transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command, check_own, check_run
from rlmesh.errors import UsageError
from rlmesh.observe.views.safe_text import shown

DESCRIPTION = """Write the trained policy of a run, or that of a checkpoint, as a folder that from_pretrained of
transformers reads and vLLM serves: safetensors, with an adapter (LoRA) added to the weights, the configuration and the
tokenizer. It runs in this process."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("export", help="write a policy as a folder of transformers", description=DESCRIPTION)
    parser.add_argument("source", metavar="RUN|CHECKPOINT", type=Path, help="a run directory, or a checkpoints/step-…")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new, or empty")
    parser.add_argument("--step", metavar="N", type=int, help="of RUN: the checkpoint of this step")
    parser.set_defaults(run=as_command("export", run))


def run(options: argparse.Namespace) -> int:
    """Write the folder; return 0."""
    if options.source.is_dir():
        is_checkpoint = (options.source / "checkpoint.json").is_file()
        (check_own if is_checkpoint else check_run)(options.source)
    try:
        from rlmesh.rl.reading.export import export
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[torch,data,rewards]'") from error
    steps = export(options.source, options.folder, step=options.step)
    print(shown(f"{options.folder}: the policy after {steps} steps"))
    return 0

"""``rlmesh evaluate CONFIG|RUN|CHECKPOINT``: answers a data set, or plays with an agent, without training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command, check_run
from rlmesh.cli.trained.agents import checkpoint_in, evaluate_agent
from rlmesh.driver.failure_report import failure_lines
from rlmesh.driver.outcome import interrupt_code
from rlmesh.errors import JobFailed, UsageError
from rlmesh.observe.views.safe_text import shown

DESCRIPTION = """Answer the validation prompts of a Run with a model, and print mean@k, maj@k and pass@k. CONFIG is a
file with the settings of the Run (rlmesh train CONFIG); RUN is the directory of a training, whose trained model or
last checkpoint is evaluated. CHECKPOINT is a checkpoint of an agent of rlmesh.envs, or a folder of tune.run: the agent
plays episodes, and the command prints their returns. Exit code 0: done; 1: the job failed; 2: something is wrong with
the settings; 130: Ctrl-C ended it."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "evaluate", help="evaluate a model, a checkpoint or an agent", description=DESCRIPTION, allow_abbrev=False,
        usage="rlmesh evaluate CONFIG|RUN [--set KEY=VALUE ...] [options]\n"
        "       rlmesh evaluate CHECKPOINT [--episodes N] [--record FILE]",
    )  # fmt: skip
    parser.add_argument(
        "what", metavar="CONFIG|RUN|CHECKPOINT", type=Path, help="a file of settings, a run directory, or an agent"
    )
    parser.add_argument("--model", metavar="FOLDER", help="evaluate this model (default: that of CONFIG or RUN)")
    parser.add_argument("--step", metavar="N", type=int, help="of RUN: the checkpoint of this step")
    parser.add_argument("--data", metavar="FILE", help="prompts (default: the validation data)")
    parser.add_argument("--samples", metavar="K", type=int, help="responses per prompt: evaluation.samples")
    parser.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[],
        help="change a setting: --set evaluation.temperature=0.6",
    )  # fmt: skip
    parser.add_argument("--name", default="evaluation", help="name of the job")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of logs and samples of the evaluation")
    agents = parser.add_argument_group("agents in environments")
    agents.add_argument("--episodes", metavar="N", type=int, help="episodes to play (default: evaluation_duration)")
    agents.add_argument(
        "--record", metavar="FILE", type=Path,
        help="record one more episode: .png (a strip of frames), .gif or .mp4",
    )  # fmt: skip
    agents.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the recorded episode (default 0)")
    parser.set_defaults(run=as_command("evaluate", run))


def run(options: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    if options.what.is_dir() and (checkpoint := checkpoint_in(options.what)) is not None:
        return evaluate_agent(checkpoint, options)
    agents = {"--episodes": options.episodes, "--record": options.record}
    if given := [flag for flag, value in agents.items() if value is not None]:
        raise UsageError(f"{', '.join(given)}: for agents, and {options.what} is no checkpoint of one")
    changes = [*options.changes, *([] if options.samples is None else [f"evaluation.samples={options.samples}"])]
    try:
        settings, weights = _of_folder(options, changes) if options.what.is_dir() else _of_file(options, changes)
        from rlmesh.rl.evaluation.evaluate import evaluate
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[torch,data,rewards]'") from error
    try:
        found = evaluate(settings, **weights, data=options.data, name=options.name, run_dir=options.run_dir)
    except JobFailed as error:
        print(shown("\n".join(["", *failure_lines(error)]), lines=True), file=sys.stderr)
        return interrupt_code(error)
    # Printed without masking of secrets, which would hide metrics such as response_tokens.
    lines = [f"{name} = {value:g}" for name, value in sorted(found.metrics.items())]
    print(shown("\n".join([*lines, f"samples: rlmesh samples {found.run_dir}"]), lines=True))
    return 0


def _of_file(options: argparse.Namespace, changes: list[str]) -> tuple[Any, dict[str, Any]]:
    from rlmesh.rl.trainers.config_files import load_run

    if options.step is not None:
        raise UsageError("--step names a checkpoint of a RUN: give the run directory instead of CONFIG")
    return load_run(options.what, changes, look=True), {"model": options.model}


def _of_folder(options: argparse.Namespace, changes: list[str]) -> tuple[Any, dict[str, Any]]:
    from rlmesh.rl.evaluation.evaluate import of_run_directory
    from rlmesh.rl.evaluation.saved_run import load_saved_run
    from rlmesh.rl.trainers.settings import apply_overrides

    if options.step is not None and options.model is not None:
        raise UsageError("--step and --model exclude each other: both name weights")
    check_run(options.what)
    settings = apply_overrides(load_saved_run(options.what), changes)
    if options.model is not None:
        return settings, {"model": options.model}
    return settings, of_run_directory(options.what, options.step)

"""``rlmesh env check | record | replay ID``: looks for faults of an environment, and repeats its episodes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import as_command, say
from rlmesh.errors import UsageError

OK, FAULTY = 0, 1


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "env",
        help="check an environment, record and replay its episodes",
        description="Environments are named as registered with Gymnasium (CartPole-v1) or as module:creator.",
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = _verb(
        verbs, "check", run_check, "look for faults that make training wrong",
        "Run the environment in a process of its own and look for faults that make training wrong without a word. The "
        "exit code is 1 if a fault is found.",
    )  # fmt: skip
    check.add_argument(
        "--num-envs", type=int, default=0, metavar="N", help="check the vector environment of N registered ones"
    )
    check.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each check (default 300)")
    check.add_argument("--step-deadline", type=float, default=5, metavar="S", help="seconds for a step (default 5)")
    check.add_argument(
        "--reset-deadline", type=float, default=60, metavar="S", help="seconds for making and resetting (default 60)"
    )
    check.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave out what this check finds")
    record = _verb(
        verbs, "record", run_record, "write an episode down, by seed and random actions",
        "Play one episode and write seed, actions and everything that the environment returned to a file.",
    )  # fmt: skip
    record.add_argument("--to", dest="target", metavar="FILE", type=Path, required=True, help="file to write")
    record.add_argument("--steps", type=int, default=1000, metavar="N", help="the most steps (default 1000)")
    replay = _verb(
        verbs, "replay", run_replay, "play a recorded episode again and compare",
        "Play the recorded actions from the recorded seed. The exit code is 1 if anything differs.",
    )  # fmt: skip
    replay.add_argument("--from", dest="source", metavar="FILE", type=Path, required=True, help="file of the recording")


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], help_text: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help_text, description=description)
    parser.add_argument("id", metavar="ID", help="a name registered with Gymnasium, or module:creator")
    parser.add_argument("--config", default="{}", metavar="JSON", help="configuration of the environment")
    if name != "replay":
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default 0)")
    parser.set_defaults(run=as_command("env", run))
    return parser


def _config(options: argparse.Namespace) -> dict[str, Any]:
    try:
        config = json.loads(options.config)
    except ValueError as error:
        raise UsageError(f"--config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config must be a JSON object, not {options.config}")
    return config


def run_check(options: argparse.Namespace) -> int:
    """Print the findings and return the exit code."""
    checks = _checks()
    if unknown := sorted(set(options.skip) - checks.CHECKS.keys()):
        raise UsageError(f"--skip: there is no check {unknown[0]!r}; the checks are {', '.join(checks.CHECKS)}")
    if options.steps < 2 or options.num_envs < 0:
        raise UsageError("--steps must be at least 2, and --num-envs at least 0")
    report = checks.check_env(
        options.id,
        config=_config(options),
        num_envs=options.num_envs,
        plan=checks.CheckPlan(seed=options.seed, steps=options.steps),
        deadlines=checks.CheckDeadlines(step_s=options.step_deadline, reset_s=options.reset_deadline),
    ).without(options.skip)
    say("\n".join(report.lines()))
    return OK if report.passed else FAULTY


def run_record(options: argparse.Namespace) -> int:
    """Write the recording and return the exit code."""
    recording = _checks().EpisodeRecording.record(
        _creator(options), name=options.id, seed=options.seed, steps=options.steps
    )
    recording.save(options.target)
    say(f"{options.target}: {len(recording.actions)} steps from seed {options.seed}, {recording.ended or 'not ended'}")
    return OK


def run_replay(options: argparse.Namespace) -> int:
    """Play the recording again, print the first difference, and return the exit code."""
    recording = _checks().EpisodeRecording.load(options.source)
    different = recording.replay(_creator(options))
    if different is not None:
        say(f"{options.id}: the episode differs from {options.source}: {different}")
        return FAULTY
    say(f"{options.id}: all {len(recording.actions)} steps are those of {options.source}")
    return OK


def _creator(options: argparse.Namespace) -> Callable[[], Any]:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    creator: Callable[[], Any] = _checks().creator_of(options.id, _config(options))
    return creator


def _checks() -> Any:
    try:
        from rlmesh.envs import checks
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[envs]'") from error
    return checks

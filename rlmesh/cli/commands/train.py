"""``rlmesh train CONFIG`` trains a language model, ``rlmesh train --run PPO --env ID`` an agent in an environment."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlmesh.cli.commands.launch import RESUMABLE
from rlmesh.cli.job_choice import as_command
from rlmesh.driver.failure_report import failure_lines
from rlmesh.driver.outcome import interrupt_code
from rlmesh.errors import JobFailed, JobStopped, UsageError
from rlmesh.observe.views.safe_text import shown
from rlmesh.rl.faults import value_of

OF_TRIALS = (
    "num_samples", "metric", "mode", "max_concurrent_trials", "resume", "restore", "checkpoint_freq",
    "checkpoint_at_end",
)  # fmt: skip
"""Options that are arguments of `rlmesh.tune.run`."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
DESCRIPTION = """Train a language model, or with --run an agent in an environment. CONFIG is a YAML or JSON file with
the settings of a Run, or a Python file that defines run = Run(...). All faults of the settings are printed together,
before any process starts. Exit code 0: the model is trained; 1: the job failed, or with --fit does not fit; 2:
something is wrong with the settings; 75: it stopped early and can be resumed; 130: Ctrl-C ended it."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "train", help="train a language model, or an agent in an environment", description=DESCRIPTION,
        allow_abbrev=False,
        usage="rlmesh train CONFIG [--from LIBRARY] [--set KEY=VALUE ...] [--check | --fit] [options]\n"
        "       rlmesh train --run NAME --env ID [--set KEY=VALUE ...] [options]",
    )  # fmt: skip
    parser.add_argument("settings", metavar="CONFIG", nargs="?", type=Path, help="a YAML, JSON or Python file")
    parser.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[],
        help="change a setting: --set actor.lr=2e-6, with --run --set model.fcnet_hiddens=64,64",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="source", metavar="LIBRARY",
        help="CONFIG is one of verl, trl-grpo, trl-ppo, trl-sft, trl-dpo or trl-reward; with --check, print what "
        "became of each of its keys",
    )  # fmt: skip
    parser.add_argument("--name", help="name of the job (default: that of the file)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of logs and checkpoints")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="check settings, model, data and rewards; start nothing")
    only.add_argument(
        "--fit", action="store_true",
        help="predict the memory of each role, and the largest token budget that fits; start nothing",
    )  # fmt: skip
    parser.add_argument("--memory", metavar="GIB", type=float, help="with --fit: memory of a device, if it is not here")
    environments = parser.add_argument_group("environments, in place of CONFIG")
    environments.add_argument("--run", dest="algorithm", metavar="NAME", help="an algorithm such as PPO")
    environments.add_argument("--env", dest="environment", metavar="ID", help="an environment such as CartPole-v1")
    environments.add_argument("--config", dest="algorithm_config", metavar="JSON", help="settings of the algorithm")
    environments.add_argument(
        "--stop", dest="stop_at", metavar="JSON",
        help='metrics that end the training: \'{"training_iteration": 10}\' (default: until Ctrl-C)',
    )  # fmt: skip
    environments.add_argument(
        "--num-samples", metavar="N", type=int,
        help='trials of a search; --config \'{"lr": {"grid_search": [1e-3, 1e-4]}}\' is one, too',
    )  # fmt: skip
    environments.add_argument(
        "--metric", metavar="NAME", help="what the best trial is chosen by (default: mean return)"
    )
    environments.add_argument("--mode", choices=("max", "min"), help="the best value of the metric (default: max)")
    environments.add_argument(
        "--max-concurrent-trials", metavar="N", type=int, help="trials at once (default: by cores)"
    )
    environments.add_argument("--resume", action="store_true", help="go on with the search in --run-dir")
    environments.add_argument("--restore", metavar="CHECKPOINT", type=Path, help="go on from this checkpoint")
    environments.add_argument("--checkpoint-freq", metavar="N", type=int, help="iterations between two checkpoints")
    environments.add_argument(
        "--checkpoint-at-end", action="store_true", help="write a checkpoint at the end, also after Ctrl-C"
    )
    parser.set_defaults(run=as_command("train", run))


def run(options: argparse.Namespace) -> int:
    """Train, check or predict; return the exit code."""
    try:
        return _run(options)
    except UsageError as error:
        # Printed without masking of secrets, which would hide settings such as max_tokens and token_budget.
        _say(f"rlmesh train: {error}", err=True)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.algorithm:
        return _train_agent(options)
    only = {"--env": options.environment, "--config": options.algorithm_config, "--stop": options.stop_at,
            **{f"--{name.replace('_', '-')}": getattr(options, name) for name in OF_TRIALS}}  # fmt: skip
    if given := [flag for flag, value in only.items() if value]:
        raise UsageError(f"{', '.join(given)}: for agents in environments; name an algorithm by --run")
    if options.settings is None:
        raise UsageError("give a CONFIG: a YAML, JSON or Python file; rlmesh train --help")
    if options.memory is not None and not options.fit:
        raise UsageError("--memory is for --fit")
    try:
        from rlmesh.rl.trainers.config_files import load_run

        if options.source is None:
            job = load_run(options.settings, options.changes, look=True)
        else:
            from rlmesh.rl.migration.reading import load_converted

            job, conversion = load_converted(options.settings, options.source, options.changes, look=True)
            _say(conversion.report(whole=options.check or options.fit))
        if options.fit:
            from rlmesh.rl.trainers.fit import fit

            found = fit(job, None if options.memory is None else int(options.memory * 2**30))
            _say(str(found))
            return 0 if found.fits is not False else 1
        if options.check:
            from rlmesh.rl.trainers.preflight import check

            _say(f"{options.settings}: the run can start; {check(job)}")
            return 0
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[torch,data,rewards]'") from error
    try:
        result = job.submit(options.name or options.settings.stem, run_dir=options.run_dir)
    except JobStopped as error:
        _say(f"rlmesh train: {error}", err=True)
        return RESUMABLE
    except JobFailed as error:
        _say("\n".join(["", *failure_lines(error)]), err=True)
        return interrupt_code(error)
    except KeyboardInterrupt as error:
        if str(error):
            run_dir = options.run_dir or "and its run directory"
            error.args = (f"{error}. Start it again with --run-dir {run_dir} to resume from its latest checkpoint",)
        raise
    for name, value in sorted(result.metrics.items()):
        _say(f"{name} = {value:g}")
    _say(f"model: {result.model}")
    return 0


def _train_agent(options: argparse.Namespace) -> int:
    """Train an agent in an environment, until a criterion or Ctrl-C ends it."""
    language = {"CONFIG": options.settings, "--name": options.name, "--check": options.check, "--from": options.source,
                "--fit": options.fit, "--memory": options.memory}  # fmt: skip
    if given := [flag for flag, value in language.items() if value]:
        raise UsageError(f"{', '.join(given)}: for language models; not together with --run")
    try:
        import gymnasium as gymnasium

        from rlmesh.tune import TrialsFailed
        from rlmesh.tune import run as run_trial
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[envs]'") from error

    settings = {**_json_object("--config", options.algorithm_config)}
    for change in options.changes:
        _set(settings, change)
    if options.environment:
        settings["env"] = options.environment
    stop = _json_object("--stop", options.stop_at) or None
    further = {name: value for name in OF_TRIALS if (value := getattr(options, name)) not in (None, False)}
    try:
        found = run_trial(options.algorithm, config=settings, stop=stop, storage_path=options.run_dir, **further)
    except TrialsFailed as error:
        _say(f"rlmesh train: {error}", err=True)
        return 1
    return INTERRUPTED if found.interrupted else 0


def _set(settings: dict[str, Any], change: str) -> None:
    """Set the value of a ``key=value``, or of a nested ``model.fcnet_hiddens=64,64``."""
    path, equals, value = change.partition("=")
    *outer, last = path.strip().split(".")
    if not equals or not last:
        raise UsageError(f"--set {change}: no setting; write --set KEY=VALUE, such as --set lr=1e-3")
    place = settings
    for name in outer:
        inner = place.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--set {change}: {name} is {inner!r}, which has no settings of its own")
        place[name] = place = dict(inner)
    place[last] = value_of(value.strip())


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"{flag} {text}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{flag} {text}: a JSON object, such as '{{\"train_batch_size\": 4000}}'")
    return value


def _say(text: str, *, err: bool = False) -> None:
    print(shown(text, lines=True), file=sys.stderr if err else sys.stdout)

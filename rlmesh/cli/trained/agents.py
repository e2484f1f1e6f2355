"""Evaluates agents of `rlmesh.envs` for ``rlmesh evaluate``: plays episodes, and records one of them."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import check_own, say
from rlmesh.errors import UsageError

__all__ = ["checkpoint_in", "evaluate_agent"]

STATE, CHECKPOINTS, EXPERIMENT = "state.pt", "checkpoints", "experiment.json"


def checkpoint_in(folder: Path) -> Path | None:
    """The checkpoint of an algorithm of `rlmesh.envs` that a folder is, or has; None if the folder has none.

    Of a training by ``tune.run`` it is the last one, of a search that of the best trial.

    Raises:
        UsageError: a training or a search without a checkpoint.
    """
    if (folder / STATE).is_file() and (folder / "config.pkl").is_file():
        return folder
    if (folder / EXPERIMENT).is_file():
        return _best(folder)
    if not (folder / "results.jsonl").is_file():
        return None
    found = sorted(path for path in (folder / CHECKPOINTS).glob("*") if (path / STATE).is_file())
    last = _last_iteration(folder)  # a training that went on from an earlier checkpoint left the later ones behind
    found = [path for path in found if not path.name.isdigit() or int(path.name) <= last] or found
    if not found:
        raise UsageError(
            f"{folder} has no checkpoint: train with tune.run(checkpoint_at_end=True), or rlmesh train --run NAME "
            "--run-dir DIR --checkpoint-at-end"
        )
    return found[-1]


def _last_iteration(folder: Path) -> int:
    """The iteration of the last result of a training; a line that was cut off is left out."""
    last = 0
    for line in (folder / "results.jsonl").read_text().splitlines():
        with suppress(ValueError):
            last = int(json.loads(line).get("training_iteration") or 0)
    return last


def _best(folder: Path) -> Path:
    check_own(folder)
    state = json.loads((folder / EXPERIMENT).read_text())
    sign = 1 if state["mode"] == "max" else -1
    known = [trial for trial in state["trials"] if trial["checkpoint"] and trial["history"]]
    if not known:
        raise UsageError(f"{folder}: no trial has a checkpoint and a value of {state['metric']!r}")
    return Path(max(known, key=lambda trial: sign * trial["history"][-1][1])["checkpoint"])


def evaluate_agent(checkpoint: Path, options: argparse.Namespace) -> int:
    """Play episodes, print returns and lengths, and record an episode if that is asked for; return 0."""
    language = {"--set": options.changes, "--model": options.model, "--step": options.step, "--data": options.data,
                "--samples": options.samples, "--run-dir": options.run_dir}  # fmt: skip
    if given := [flag for flag, value in language.items() if value]:
        raise UsageError(f"{', '.join(given)}: for language models; {checkpoint} is an agent of rlmesh.envs")
    if options.episodes is not None and options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: at least 1")
    check_own(checkpoint)
    try:
        from rlmesh.envs import Algorithm
        from rlmesh.envs.algorithms.checkpoint import config_of
        from rlmesh.envs.recording.pictures import require_format
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'rlmesh[envs]'") from error

    if options.record is not None:
        require_format(options.record)
    config = config_of(checkpoint).evaluation(evaluation_num_env_runners=0).env_runners(num_env_runners=0)
    if options.episodes is not None:
        config.evaluation(evaluation_duration=options.episodes, evaluation_duration_unit="episodes")
    kind: Any = config.algorithm_class
    with kind(config) as algorithm:
        assert isinstance(algorithm, Algorithm)
        algorithm.restore(checkpoint)
        found = algorithm.evaluate()["env_runners"]
        say("\n".join(f"{name} = {found[name]:g}" for name in NUMBERS))
        if options.record is not None:
            from rlmesh.envs.recording.episodes import record_episode

            episode = record_episode(algorithm, options.record, seed=options.seed)
            ended = episode.ended or "not ended"
            say(f"{options.record}: {len(episode.rewards)} steps, return {episode.total:g}, {ended}")
            for agent, total in episode.of_agents.items():
                say(f"return of {agent} = {total:g}")
    return 0


NUMBERS = ("episode_return_mean", "episode_return_min", "episode_return_max", "episode_len_mean", "num_episodes")

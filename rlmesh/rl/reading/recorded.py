"""The groups of a recorded step, read from its file of samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh.errors import UsageError
from rlmesh.rl.rollout.ledger import LEDGER, read_rows
from rlmesh.rl.samples.files import read_rows_with_tokens, sample_files
from rlmesh.rl.types import Episode, Failed, Group, Outcome, Score, Turn

__all__ = ["TOTAL", "recorded_groups", "recorded_steps", "recorded_total"]

TOTAL = "total"
"""Name of the only outcome of a recorded episode: the sum of its rewards."""


def recorded_steps(run_dir: Path) -> list[int]:
    """The training steps whose samples are kept."""
    return [one.step for one in sample_files(run_dir) if one.split == "train"]


def recorded_groups(run_dir: Path, step: int) -> list[Group]:
    """The groups that a step was trained on, in their order.

    Log-probabilities are of the whole vocabulary (`Episode.sampled_log_probs`).

    Raises:
        UsageError: the samples of the step are not kept or cannot be read, or are not those that the ledger names.
    """
    found = [one for one in sample_files(run_dir) if one.split == "train" and one.step == step]
    if not found:
        there = recorded_steps(run_dir)
        kept = f"steps {there[0]} to {there[-1]} ({len(there)} of them)" if there else "no step"
        raise UsageError(
            f"the samples of step {step} are missing: {run_dir} has those of {kept}. A run keeps them with pyarrow and "
            "sample_files.every=1, within sample_files.most_mib"
        )
    rows = read_rows_with_tokens(found[0])
    groups = [
        Group((epoch, index), tuple(map(_episode, own)))
        for (epoch, index), own in groupby(rows, key=lambda row: (row["epoch"], row["index"]))
    ]
    _check_ledger(run_dir, step, [(group.key[0], group.key[1]) for group in groups])
    return groups


def recorded_total(episode: Episode) -> Outcome:
    """The sum of an episode's rewards, as it was recorded."""
    return episode.outcomes[TOTAL]


def _check_ledger(run_dir: Path, step: int, keys: list[tuple[int, int]]) -> None:
    path = run_dir / LEDGER
    if not path.exists():
        return
    trained = [
        (row.position, (row.epoch, row.prompt))
        for row in read_rows(path)
        if row.step == step and row.state in ("trained", "sampled")
    ]
    named = [key for _, key in sorted(trained)]
    if named != keys:
        raise UsageError(
            f"the samples of step {step} are not those that it was trained on: their prompts are {keys[:8]}, those of "
            f"the ledger {named[:8]} (epoch, index). The run went back after the samples were written, or the step is "
            "not finished"
        )


def _episode(row: Mapping[str, Any]) -> Episode:
    value = row["reward"]
    total: Outcome = Failed(row["said"] or "no reward") if value is None else Score(value)
    return Episode((Turn.said(row["prompt_ids"]), *_turns(row)), row["finish_reason"], {TOTAL: total})


def _turns(row: Mapping[str, Any]) -> Iterator[Turn]:
    """The turns after the prompt: sequences of tokens from one source. Turns of the policy that follow each other
    directly become one turn, which changes no mask and no number."""
    ids = np.asarray(row["response_ids"], np.int32)
    log_probs = np.asarray(row["log_probs"], np.float32)
    mask = np.asarray(row["response_mask"], np.bool_)
    versions = [int(version) for version, start, end in json.loads(row["versions"]) for _ in range(end - start)]
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)] if len(ids) else []
    said = 0
    for start, end in pairwise(edges):
        if not mask[start]:
            yield Turn.said(ids[start:end])
            continue
        spans, own = [], versions[said : said + end - start]
        said += end - start
        for version, part in groupby(range(len(own)), key=lambda place: own[place]):
            places = list(part)
            spans.append((version, places[0], places[-1] + 1))
        yield Turn(ids[start:end], "policy", log_probs[start:end], version_spans=tuple(spans))
    if not len(ids):
        yield Turn(ids, "policy", log_probs)

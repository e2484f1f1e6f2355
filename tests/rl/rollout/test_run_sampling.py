"""`RunSampling`: its state in a checkpoint, and what of it counts after settings have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.checkpoints.state import decoded, encoded
from rlmesh.rl.data.dataset import Prompt
from rlmesh.rl.data.loader import PromptLoader
from rlmesh.rl.rollout.run_sampling import RunSampling
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import RolloutSettings
from rlmesh.rl.types import Score
from tests.rl.rollout.fakes import group_of, scored
from tests.rl.run_job import ROWS, is_a


def is_short(response: str) -> Score:
    return Score(float(len(response) < 3))


class Data:
    """Prompts without a tokenizer."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(np.array([index + 2], np.int32), {"index": index}, index)


def run_of(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "model": "m", "data": ROWS, "rewards": [is_a], "algorithm": GRPO(samples=2), "batch_size": 2, "steps": 4,
        "pipeline": "async(staleness=1)", "rollout": RolloutSettings(temperature=1.0),
    }  # fmt: skip
    return Run(**settings | changes)


def sampling(run: Run, folder: Path) -> RunSampling:
    data: Any = Data()
    return RunSampling(run, PromptLoader(data, 2, seed=0), scored, lambda episode: Score(0.0), folder)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"rollout": RolloutSettings(temperature=1.0, engines=2, in_flight=3)}, True),
        ({"rollout": RolloutSettings(temperature=0.7)}, False),
        ({"rewards": [is_a, is_short]}, False),
        ({"algorithm": GRPO(samples=4)}, False),
    ],
)
def test_groups_that_other_settings_made_are_sampled_anew(
    tmp_path: Path, changed: dict[str, Any], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities at another temperature give wrong ratios; groups of another size are no batch."""
    link: Any = None
    with acting_as(WorkerContext(JobInfo("job", "id", None), "TRAINER", 0, 1, link)):
        first = sampling(run_of(), tmp_path)
        first.slots.advance(0)
        for slot in first.slots.draw(lambda position: first._loader.draw(position).key):
            first.slots.ask(slot)
            (group,) = scored([group_of(slot.position, 0)])
            first.slots.sampled(slot, group)
            first.slots.scored(slot, group)
        state = decoded(encoded(first.state()))
        first.close()
        again = sampling(run_of(**changed), tmp_path)
        again.restore(state)
        again.close()
    assert [slot.position for slot in again.slots] == [0, 1, 2, 3]
    assert {slot.state for slot in again.slots} == {"sampled" if kept else "drawn"}
    assert ("4 groups were made before" in caplog.text) == (not kept)

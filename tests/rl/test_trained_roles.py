"""Models in training go on from the step that the trainer means, or refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.errors import SourceRestarted, UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.defaults import run_settings
from rlmesh.rl.roles.fused import ActorRollout
from rlmesh.rl.trainers.progress import Progress, checkpoint_folder, remove_other_checkpoints
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings
from tests.rl.run_job import is_a


def worker(config: Any = None) -> WorkerContext:
    link: Any = None
    return WorkerContext(JobInfo("job", "id", config), "ACTOR", 0, 1, link)


def role(kind: type[Any], optimizer_steps: int, epochs: int = 2) -> Any:
    made = kind()
    made.engine = SimpleNamespace(steps=optimizer_steps)
    made.settings = ActorSettings(epochs=epochs)
    return made


def test_a_role_that_lost_steps_computes_nothing() -> None:
    """It may restart between two calls, of which the caller learns nothing."""
    calls: list[Any] = [
        lambda: role(ActorRole, 8).log_probs([], 5),
        lambda: role(ActorRole, 8).update(None, 5),
        lambda: role(ActorRole, 8).save(5),
        lambda: role(ActorRollout, 8).publish(5),
        lambda: role(CriticRole, 8).values([], 5),
        lambda: role(CriticRole, 8).update(None, 5),
    ]
    with acting_as(worker()):
        for call in calls:
            with pytest.raises(SourceRestarted, match="ACTOR:0 has the weights of step 4, not of step 5: it restarted"):
                call()


def test_built_in_roles_need_a_run() -> None:
    settings = {"model": "m", "data": "d.jsonl", "rewards": [is_a], "algorithm": GRPO(samples=2)}
    with acting_as(worker(settings)):
        assert run_settings() == Run(**settings)  # type: ignore[arg-type]
    with (
        acting_as(worker([1])),
        pytest.raises(UsageError, match=r"ACTOR:0 is a built-in role.*config\(Run\(model=…, …\)\), not with list"),
    ):
        run_settings()


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Progress.read(tmp_path) == Progress(0, 0)
    Progress(7, 4).write(tmp_path)
    assert Progress.read(tmp_path) == Progress(7, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    for step in (2, 4, 6):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    remove_other_checkpoints(tmp_path, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]

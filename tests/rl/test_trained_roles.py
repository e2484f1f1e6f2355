"""Models in training go on from the step that the trainer means, or refuse."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.errors import SourceRestarted, UsageError
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.defaults import YOUNG_OBJECTS, keep_objects, run_settings
from rlmesh.rl.roles.fused import ActorRollout
from rlmesh.rl.trainers import here
from rlmesh.rl.trainers.progress import Progress
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings
from tests.rl.run_job import ROWS, is_a


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


def test_a_role_that_failed_within_a_step_is_at_no_step() -> None:
    """It goes back to a checkpoint: the weights after the step before are gone."""
    assert role(ActorRole, 8).finished_steps() == 4 and role(CriticRole, 0).finished_steps() == 0
    assert role(ActorRole, 9).finished_steps() == role(CriticRole, 1).finished_steps() == -1


def test_a_model_that_begins_anew_leaves_the_old_one(tiny: Path, tmp_path: Path) -> None:
    """Objects of a role are kept out of garbage collections once it is set up: those of the old engine must not be."""
    run = Run(model=str(tiny), data=ROWS, rewards=[is_a], algorithm=GRPO(samples=2))
    link: Any = None
    job = JobInfo("job", "id", run)
    with here.one_rank():
        actor = here.RoleHere(WorkerContext(job, "ACTOR", 0, 1, link, run_dir=tmp_path), TrainedActor)
        try:
            actor.invoke("setup")
            assert gc.get_freeze_count() > 0
            made = actor._object
            old, first = weakref.ref(made.engine.plain), next(made.engine.plain.parameters()).detach().clone()
            with torch.no_grad():
                next(made.engine.plain.parameters()).add_(1.0)
            made.engine.steps = 3
            actor.invoke("restore", 0)
            assert old() is None and made.version == 0
            assert torch.equal(next(made.engine.plain.parameters()), first)
        finally:
            actor.invoke("teardown")
            gc.unfreeze()


def test_garbage_is_collected_seldom_while_a_trainer_is_in_this_process(tmp_path: Path) -> None:
    class Seldom:
        def setup(self) -> None:
            keep_objects(seldom=True)

    link: Any = None
    job, before = JobInfo("job", "id", None), gc.get_threshold()
    with here.roles_here({"TRAINER": Seldom}, lambda role: WorkerContext(job, role, 0, 1, link, run_dir=tmp_path)):
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
    assert gc.get_threshold() == before


class TrainedActor(ActorRole):
    """The actor, without receivers of its weights, and with a model that only a garbage collection can free."""

    def make_model(self) -> Any:
        model: Any = super().make_model()
        model.itself = lambda: model
        return model

    def offer_weights(self) -> None:
        pass


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
    Progress(7, 4, "{}").write(tmp_path)
    assert Progress.read(tmp_path) == Progress(7, 4, "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    (tmp_path / "progress.json").write_text("")
    assert Progress.read(tmp_path) == Progress(), "the machine failed"
    (tmp_path / "progress.json").write_text('{"step": 2, "saved": 2}')
    with pytest.raises(UsageError, match=r"progress\.json is of another version of rlmesh"):
        Progress.read(tmp_path)

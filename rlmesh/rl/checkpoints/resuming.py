"""Resuming of a run: finds the step to which all roles return, and restores the trainer's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmesh import current_worker
from rlmesh.errors import UsageError
from rlmesh.rl.checkpoints.changes import Resumable, changes, described, parts_of
from rlmesh.rl.checkpoints.state import EncodedState, decoded, encoded, has_record, restore_states, states_of
from rlmesh.rl.checkpoints.store import CheckpointStore, RunCheckpoint, checkpoint_folder, read_checkpoint, saved_step
from rlmesh.rl.checkpoints.writer import CheckpointWriter
from rlmesh.rl.trainers.progress import Progress, finished_steps

__all__ = ["TrainerCheckpoints", "before_start", "require_resumable"]

LIGHT_BYTES = 64 << 10
"""States up to this size are written after each step, so that a restart of the trainer alone loses no step."""
METRICS, OBJECTS = "metrics", "objects"


class TrainerCheckpoints:
    """The trainer's view of the checkpoints of its run.

    Args:
        run: the settings of the run.
        run_dir: the run directory.
        roles: function that returns section and members of each model in training.
        objects: function that returns the trainer's objects by name; those that are `Stateful` belong to a checkpoint.
        position: function from the number of finished steps to the position in the data.
        tell: prints a text for people.
        prompts_rounded_down: of a `Mixture`: see there.

    Attributes:
        lost: the number of reported steps that restarts have undone.
    """

    def __init__(
        self,
        run: Resumable,
        run_dir: Path,
        *,
        roles: Callable[[], Sequence[tuple[str, Any]]],
        objects: Callable[[], Mapping[str, Any]],
        position: Callable[[int], Mapping[str, int]],
        tell: Callable[[str], None],
        prompts_rounded_down: int | None = None,
    ) -> None:
        self.run, self.run_dir, self.lost = run, run_dir, 0
        self.store = CheckpointStore(run_dir, keep_last=run.keep_last, keep_best=run.keep_best)
        self.writer = CheckpointWriter(self.store, roles, current_worker(), tell)
        self._objects, self._position, self._tell = objects, position, tell
        self._rounded_down = prompts_rounded_down
        self._first = encoded(self._state({}))
        self._settings = described(run)
        self._compared = self._disk_told = self._best_told = False

    def step_after(self, reached: set[int]) -> int:
        """The step to which all roles return.

        Args:
            reached: the numbers of finished steps of all members in training.

        Raises:
            UsageError: the checkpoint is refused, or the settings that wrote it differ in one that may not change.
        """
        self.writer.wait()
        progress, saved = Progress.read(self.run_dir), self.store.latest_step
        stays = reached == {progress.step} and (progress.step == saved or progress.state is not None)
        step = progress.step if stays else saved
        self.lost = progress.lost + max(progress.step - step, 0)
        if saved:
            self._compare(self.store.read(saved))
        return step

    def _compare(self, checkpoint: RunCheckpoint) -> None:
        if self._compared:
            return
        require_resumable(self.run, checkpoint, self._settings)
        now = self._position(checkpoint.step)
        if dict(checkpoint.position) != dict(now):
            raise UsageError(self._other_prompts(checkpoint, now["prompts"]))
        if text := changes(checkpoint.settings, self._settings, checkpoint.step):
            self._tell(text)
        self._compared = True

    def _other_prompts(self, checkpoint: RunCheckpoint, now: int) -> str:
        """Why a checkpoint of the same data and settings was written with another number of prompts, and what to do."""
        before = checkpoint.position["prompts"]
        new_run = f"begin a new run with the weights: restore={str(checkpoint.folder)!r}"
        if before == self._rounded_down:
            return (
                f"{checkpoint.folder} was written by an earlier version of rlmesh, which rounded parts of a mixture "
                f"down: an epoch had {before} prompts, and now it has {now}, so a step would take prompts that earlier "
                f"steps have used, or leave some out. Go on with the version that wrote it, or {new_run}"
            )
        return (
            f"{checkpoint.folder} was written with {before} prompts that are not too long, and now there are {now}: "
            f"the tokenizer or its chat template is another one. Go on with the earlier one, or {new_run}"
        )

    def restore(self, step: int) -> dict[str, float]:
        """Restore the trainer's objects to their state after a step, to which all roles have returned.

        Returns:
            the metrics of the step.
        """
        progress, saved = Progress.read(self.run_dir), self.store.latest_step
        where = str(checkpoint_folder(self.run_dir, saved))
        if step == 0:
            state = decoded(self._first)
        elif step == saved:
            state = self.store.read(saved).trainer_state()
        else:
            assert step == progress.step and progress.state is not None
            state, where = decoded(EncodedState(progress.state.encode(), b"")), str(self.run_dir)
        noted = state[OBJECTS]
        objects = {name: one for name, one in self._objects().items() if name in noted or not has_record(one)}
        restore_states(objects, noted, where)
        for name, one in self._objects().items():
            if name not in objects:
                one.go_back(step)
        self.store.remove_incomplete()
        metrics: dict[str, float] = state[METRICS]
        self._note(Progress(step, self.lost, self._light(metrics)))
        return metrics

    def begin(self, step: int) -> bool:
        """Begin the checkpoint of a step, see `CheckpointWriter.begin`."""
        return self.writer.begin(step)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write that a step is finished and reported, and complete the checkpoint that was begun for it."""
        self._note(Progress(step, self.lost, self._light(metrics)))
        if self.writer.begun != step:
            return
        best = self.run.keep_best.removeprefix("-")
        if best and best not in metrics and not self._best_told:
            self._best_told = True
            self._tell(f"keep_best: step {step} has no metric {best!r}, so its checkpoint cannot be the best")
        about = {"metrics": dict(metrics), "settings": self._settings, "position": dict(self._position(step))}
        records = [one.make_durable() for one in self._objects().values() if hasattr(one, "make_durable")]
        self.writer.complete(step, self._state(metrics), about, records)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and remove checkpoints that are not kept."""
        if self.writer.wait():
            self.store.prune()

    def _state(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {METRICS: dict(metrics), OBJECTS: states_of(self._objects())}

    def _light(self, metrics: Mapping[str, float]) -> str | None:
        """The state that is written after each step, without objects that have a record of their own; None: it is too
        large."""
        noted = {name: one for name, one in self._objects().items() if not has_record(one)}
        state = {METRICS: dict(metrics), OBJECTS: states_of(noted)}
        found = encoded(state)
        return None if found.arrays or found.size_bytes > LIGHT_BYTES else found.text.decode()

    def _note(self, progress: Progress) -> None:
        try:
            progress.write(self.run_dir)
        except OSError as error:  # a restart then goes back to the latest checkpoint
            if not self._disk_told:
                self._tell(f"the progress of the run cannot be noted, and training goes on: {error}")
            self._disk_told = True


def require_resumable(run: Resumable, checkpoint: RunCheckpoint, settings: Mapping[str, Any] | None = None) -> None:
    """Check that a run can resume from a checkpoint.

    Raises:
        UsageError: a part is missing, incomplete or was altered, or a setting differs that may not change.
    """
    changes(checkpoint.settings, described(run) if settings is None else settings, checkpoint.step)
    for role in parts_of(run.algorithm):
        checkpoint.require_part(role)
    checkpoint.trainer_state()


def before_start(run: Resumable, run_dir: Path | None) -> int:
    """Check that a run may start in a run directory.

    Args:
        run_dir: the run directory; None: a new one.

    Returns:
        the number of finished steps if the run is complete already, else 0.

    Raises:
        UsageError: ``resume`` contradicts the run directory, or the run cannot resume from the checkpoint.
    """
    saved = saved_step(run_dir) if run_dir is not None else 0
    done = finished_steps(run_dir) if run_dir is not None else 0
    if run.resume == "never" and (saved or done):
        raise UsageError(
            f"resume='never', and {run_dir} has the checkpoint of step {saved or done}: name another run directory, or "
            "remove this one"
        )
    if run.resume == "must" and not (saved or done):
        where = f"{run_dir} has no complete checkpoint" if run_dir is not None else "no run directory is named"
        raise UsageError(f"resume='must', and {where}: name that of the run to go on with (run_dir=…, --run-dir)")
    if done >= run.steps:
        return done
    if saved and run_dir is not None:
        require_resumable(run, read_checkpoint(checkpoint_folder(run_dir, saved)))
    return 0

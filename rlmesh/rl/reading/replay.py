"""`replay`: computes a recorded step of a run again, from the checkpoint before it and the samples.

On CPUs, in float32, with one thread and one rank, the weights, the loss and all metrics of the optimizer steps are
equal bit for bit; elsewhere they are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlmesh import acting_as
from rlmesh.errors import UsageError
from rlmesh.rl.checkpoints.changes import changes, described
from rlmesh.rl.checkpoints.state import restore_states, seed_generators
from rlmesh.rl.checkpoints.store import checkpoint_folder, read_checkpoint
from rlmesh.rl.drift import DriftAlarm
from rlmesh.rl.engines.weight_parts import owned_names
from rlmesh.rl.reading.lone_roles import lone_roles
from rlmesh.rl.reading.recorded import recorded_groups, recorded_total
from rlmesh.rl.reading.steps import read_steps
from rlmesh.rl.roles.trained import TrainedRole
from rlmesh.rl.trainers.batches import lengths_of
from rlmesh.rl.trainers.here import NO_MEMBERS, RoleHere
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.types import Episode, Group, Outcome

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["Replayed", "replay"]

ALGORITHM = "algorithm"
"""Names in a checkpoint of the algorithm's state, and of the state of the drift alarm."""
ALARM = "alarm"


@dataclass(frozen=True)
class Replayed:
    """A step that was computed again.

    Attributes:
        step: the step.
        began: the step of the checkpoint that the replay began with; 0: the beginning of the run.
        metrics: metrics of the step, as computed now.
        recorded: metrics of the step's report.
        weights_equal: True if the weights after the step equal those of the step's checkpoint bit for bit; None: the
            step has no checkpoint.
        limits: reasons why bits may differ, one sentence each.
        weights: the actor's weights after the step, by name.
    """

    step: int
    began: int
    metrics: Mapping[str, float]
    recorded: Mapping[str, float]
    weights_equal: bool | None
    limits: Sequence[str]
    weights: Mapping[str, torch.Tensor]

    @property
    def equal(self) -> bool:
        """True if all metrics that both have are the same numbers, and no weight differs."""
        return not self.differing and self.weights_equal is not False

    @property
    def differing(self) -> list[str]:
        """The metrics that differ."""
        return [name for name in self.common if self.metrics[name] != self.recorded[name]]

    @property
    def common(self) -> list[str]:
        """The metrics that both have."""
        return [name for name in self.metrics if name in self.recorded]

    def __str__(self) -> str:
        origin = f"the checkpoint of step {self.began}" if self.began else "the beginning of the run"
        lines = [f"step {self.step}, computed from {origin}:", f"{'':<32}{'now':>24}{'recorded':>24}"]
        for name in self.common:
            sign = "" if self.metrics[name] == self.recorded[name] else "  differs"
            lines.append(f"{name:<32}{self.metrics[name]:>24.17g}{self.recorded[name]:>24.17g}{sign}")
        said = {
            None: f"step {self.step} has no checkpoint to compare the weights with",
            True: "the weights are those of the step's checkpoint, bit for bit",
            False: "the weights differ from those of the step's checkpoint",
        }
        lines.append(said[self.weights_equal])
        if not self.equal:
            lines += [f"bits may differ: {one}" for one in self.limits] or [
                "nothing that is known makes them differ: the code, the libraries or the machine are others, or the "
                "run had an actor or a trainer of its own"
            ]
        return "\n".join(lines)


def replay(run_dir: Path, run: Run, step: int) -> Replayed:
    """Compute a step again; see the module. Steps between the checkpoint and this one are computed again too.

    Args:
        run_dir: the run directory. Nothing is written there.
        run: the run's settings (`rlmesh.rl.evaluation.saved_run.load_saved_run`).
        step: from 1 on.

    Raises:
        UsageError: the recording lacks something that the step needs; the message says what.
    """
    reports = {one.step: one.metrics for one in read_steps(run_dir)}
    _require_replayable(run, reports, step, run_dir)
    began = _checkpoint_before(run_dir, step)
    groups = {number: recorded_groups(run_dir, number) for number in range(began + 1, step + 1)}
    folder = checkpoint_folder(run_dir, began) if began else None
    with lone_roles(run, folder) as (roles, context), acting_as(context):
        trainer = _Replayer(roles, groups)
        trainer.setup()
        if folder is not None:
            trainer.restore(folder)
        for number in range(began + 1, step + 1):
            trainer.step(number)
        weights = _weights_of(roles["ACTOR"])
    after = checkpoint_folder(run_dir, step)
    equal: bool | None = None
    limits = _limits(run)
    if (after / "checkpoint.json").exists():
        limits += _changed_since(run, after)
        with lone_roles(run, after, actor_only=True) as (saved, _):
            kept = _weights_of(saved["ACTOR"])
        equal = kept.keys() == weights.keys() and all(torch.equal(kept[name], weights[name]) for name in kept)
    elif folder is not None:
        limits += _changed_since(run, folder)
    return Replayed(step, began, trainer.last, reports[step], equal, tuple(limits), weights)


def _require_replayable(run: Run, reports: Mapping[int, Any], step: int, run_dir: Path) -> None:
    if step not in reports:
        known = f"{min(reports)} to {max(reports)}"
        raise UsageError(f"step {step} is not reported in {run_dir}: there are reports of steps {known}")
    if run.algorithm.responses != "sampled":
        raise UsageError(
            f"{type(run.algorithm).__name__} trains on the responses of the data, of which a run keeps no samples, so "
            "a step cannot be computed again"
        )
    if "greedy" in run.algorithm.needs:
        raise UsageError("a run keeps no rewards of greedy responses, which the algorithm needs (advantage='remax')")


def _checkpoint_before(run_dir: Path, step: int) -> int:
    """The latest step before ``step`` that has a checkpoint; 0: there is none."""
    found = (run_dir / "checkpoints").glob("step-*/checkpoint.json")
    steps = [int(path.parent.name.removeprefix("step-")) for path in found]
    return max((one for one in steps if one < step), default=0)


def _weights_of(actor: RoleHere) -> dict[str, torch.Tensor]:
    role: TrainedRole = actor.object
    source = role.engine.named_tensors()
    names = owned_names(source.manifest())
    with source.gather(names) as tensors:
        return {name: tensors[name].detach().cpu().clone() for name in names}


def _limits(run: Run) -> list[str]:
    found = []
    if run.devices:
        found.append("the run was on GPUs, whose sums have no fixed order")
    for name, section in (("actor", run.actor), ("critic", run.critic)):
        if name == "critic" and "critic" not in run.algorithm.needs:
            continue
        if section.ranks > 1:
            found.append(f"{name}.ranks={section.ranks}: one rank adds up gradients in another order")
        if section.threads != 1:
            found.append(f"{name}.threads={section.threads}: several threads add up in another order")
        if section.precision != "float32":
            found.append(f"{name}.precision={section.precision}")
    return found


def _changed_since(run: Run, folder: Path) -> Iterator[str]:
    """The settings that changed after a checkpoint: a run directory has those of its last start only."""
    saved = read_checkpoint(folder)
    if changed := changes(saved.settings, described(run), saved.step):
        yield f"the step is computed with the settings of the last start; {changed}"


class _RecordedRewards:
    """Stands for the rewards of the run: returns the recorded sums."""

    def total(self, episode: Episode) -> Outcome:
        return recorded_total(episode)


class _Replayer(Trainer):
    """The trainer of a run without engines, buffer and files: its steps take recorded groups.

    Args:
        roles: the roles in this process, by name.
        groups: the groups of each step.
    """

    def __init__(self, roles: Mapping[str, RoleHere], groups: Mapping[int, Sequence[Group]]) -> None:
        self._roles, self._groups = roles, groups

    def setup(self) -> None:
        from rlmesh.rl.roles.defaults import run_settings

        self.settings = run_settings()
        self.algorithm, self.holder = self.settings.algorithm, None
        self.rewards: Any = _RecordedRewards()
        self.alarm = DriftAlarm(self.settings.actor.precision)
        self.version, self.last = 0, {}

    def restore(self, checkpoint: Path) -> None:
        """Restore the algorithm and the drift alarm from a checkpoint, whose weights the roles have already."""
        saved = read_checkpoint(checkpoint)
        states = saved.trainer_state()["objects"]
        objects = {ALGORITHM: self.algorithm, ALARM: self.alarm}
        known = {name: state for name, state in states.items() if name in objects}
        restore_states(objects, known, str(checkpoint))
        self.version = saved.step

    def step(self, step: int) -> None:
        """One step as `Trainer.step` makes it, without sampling, rewards, files and pushes."""
        seed_generators(self.settings.seed, step, ("TRAINER",))
        groups = self._groups[step]
        packs, batch = self.evaluate(groups)
        weights = self.algorithm.weigh(batch)
        self.last = lengths_of(groups) | self.train(packs, batch, weights)
        self.last = {name: value for name, value in self.last.items() if not name.startswith("memory/")}
        self.version = step

    def group(self, role: str) -> Any:
        return self._roles.get(role) or NO_MEMBERS

    def teardown(self) -> None:
        """Frees nothing: a replay opens nothing in its set-up."""

"""The side of rlmesh: the trainer's own stages on recorded samples, with the actor in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from post_training_samples import Ids, RecordedBatch
from post_training_trl import Settings, StepSeen

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.rl.algorithms import GRPO, Algorithm
from rlmesh.rl.drift import DriftAlarm, DriftLimits
from rlmesh.rl.rewards import Reward
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.device_turns import DeviceTurns
from rlmesh.rl.roles.reference import REFERENCE, FrozenPolicy, ReferenceRole
from rlmesh.rl.roles.trained import TRAINING, TrainedRole, make_engine
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.types import Episode, Group, Score, Turn

__all__ = ["LocalRun", "algorithm_of", "groups_of"]


def algorithm_of(settings: Settings, samples: int, response_tokens: int) -> GRPO:
    """The algorithm with the settings of TRL."""
    kind = settings.loss
    # TRL adds 1e-4 to the deviation of a group, and bounds CISPO's ratio from above only.
    return GRPO(
        samples=samples,
        loss=kind,  # type: ignore[arg-type]
        clip_low=None if kind in ("cispo", "sapo") else settings.clip_low,
        clip_high=None if kind == "sapo" else settings.clip_high,
        constant=float(response_tokens) if kind == "dr_grpo" else None,
        kl=settings.kl,
        eps=1e-4,
    )


def groups_of(batch: RecordedBatch) -> list[Group]:
    """The recorded samples as groups of episodes that are scored."""

    def episode(prompt: Ids, row: Ids, reward: float) -> Episode:
        turn = Turn(np.asarray(row, np.int32), "policy", np.zeros(len(row), np.float32), None, ((0, 0, len(row)),))
        return Episode((Turn.said(prompt), turn), outcomes={"recorded": Score(reward)})

    return [
        Group((0, number), tuple(episode(prompt, row, reward) for row, reward in zip(rows, rewards, strict=True)))
        for number, (prompt, rows, rewards) in enumerate(
            zip(batch.prompts, batch.responses, batch.rewards, strict=True)
        )
    ]


class LocalRun:
    """The trainer's stages after sampling: packs, evaluation by the roles, weights, optimizer steps.

    Args:
        model: trained in place.
        settings: shared with TRL.
        reference: the model before training, if the divergence has weight.
        critic: a value model, trained in place with the same settings, if the algorithm needs one.
        algorithm: ``None``: GRPO with the settings.
        token_budget: of a pack.
        minibatches: optimizer steps of a pass over a batch.
    """

    def __init__(
        self,
        model: Any,
        samples: int,
        response_tokens: int,
        settings: Settings,
        *,
        reference: Any = None,
        critic: Any = None,
        algorithm: Algorithm | None = None,
        token_budget: int = 8192,
        minibatches: int = 1,
    ) -> None:
        trained: dict[str, Any] = {
            "lr": settings.lr, "weight_decay": settings.weight_decay, "max_grad_norm": settings.max_grad_norm,
            "epochs": settings.epochs, "token_budget": token_budget, "threads": 0, "minibatches": minibatches,
            "activation_checkpointing": settings.activation_checkpointing,
        }  # fmt: skip
        run = Run(
            model="", data=[], rewards=[Reward(_recorded, name="recorded")],
            algorithm=algorithm or algorithm_of(settings, samples, response_tokens),
            actor=ActorSettings(**trained), critic=CriticSettings(**trained),
        )  # fmt: skip
        self.actor = LocalActor(run, model, settings.eps)
        roles: dict[str, Any] = {"ACTOR": self.actor}
        if reference is not None:
            roles["REFERENCE"] = LocalReference(run, reference)
        if critic is not None:
            roles["CRITIC"] = self.critic = LocalCritic(run, critic, settings.eps)
        self.trainer = LocalTrainer(run, roles)

    def step(self, batch: RecordedBatch) -> list[StepSeen]:
        """Train on one batch; one result per optimizer step."""
        return self.train(groups_of(batch))

    def train(self, groups: list[Group]) -> list[StepSeen]:
        """Train on the scored groups of a batch; one result per optimizer step."""
        self.actor.reports.clear()
        trainer = self.trainer
        packs, evaluated = trainer.evaluate(groups)
        trainer.train(packs, evaluated, trainer.algorithm.weigh(evaluated))
        trainer.version += 1
        return [StepSeen(report.loss, report.grad_norm) for report in self.actor.reports]


class LocalTrainer(Trainer):
    """The trainer without a job, whose calls are plain calls."""

    def __init__(self, run: Run, roles: dict[str, Any]) -> None:
        self.settings, self.algorithm, self.version = run, run.algorithm, 0
        self.holder, self.shares = None, False
        self.rewards = Rewards(run.scored, Mute(), workers=1)
        # Recorded samples have no log-probabilities of an engine, so every gap is allowed.
        self.alarm = DriftAlarm(DriftLimits(float("inf"), float("inf")))
        self._roles = roles

    def group(self, role: str) -> Any:
        return OneMember(self._roles.get(role), role, self.settings)


class Mute:
    """A tokenizer of scored responses, which nobody decodes."""

    def decode(self, *_: Any, **__: Any) -> str:
        raise AssertionError("recorded samples are scored")


class LocalTrained(TrainedRole):
    """A model in training without a job, which keeps the report of each optimizer step."""

    def __init__(self, run: Run, model: Any, eps: float) -> None:
        self.run_settings, self.settings = run, getattr(run, self.section)
        self.who = self.section.upper(), 0
        self.device = next(model.parameters()).device
        self.turns = DeviceTurns(leased=False)
        engine: Any = make_engine(run.train, model, self.settings, run.steps)
        self.engine = engine
        for group in engine.optimizer.param_groups:
            group["eps"] = eps
        self.turns.add(TRAINING, wake=lambda: None, sleep=lambda: None)
        self.reports: list[Any] = []
        inner = engine.train_step

        def train_step(*args: Any) -> Any:
            self.reports.append(inner(*args))
            return self.reports[-1]

        engine.train_step = train_step


class LocalCritic(LocalTrained, CriticRole):
    """The critic without a job."""


class LocalActor(LocalTrained, ActorRole):
    """The actor without a job."""

    def time_phases(self, synchronize: Callable[[], None]) -> dict[str, float]:
        """A dict to which each phase adds its seconds from now on."""
        return time_phases(self, synchronize)


def time_phases(role: Any, synchronize: Callable[[], None]) -> dict[str, float]:
    """Add the seconds of the actor's phases to the dict that is returned."""
    spent: dict[str, float] = {}

    def timed(owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                synchronize()
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, call)

    timed(role.engine, "packed_log_probs", "log-probabilities")
    timed(role, "loss", "forward")
    timed(role.engine, "_backward", "backward")
    timed(role.engine, "_apply", "optimizer step")
    return spent


class LocalReference(ReferenceRole):
    """The reference without a job."""

    def __init__(self, run: Run, model: Any) -> None:
        self.run_settings, self.turns = run, DeviceTurns(leased=False)
        self.policy = FrozenPolicy(model.eval(), run.rollout.temperature)
        self.turns.add(REFERENCE, wake=lambda: None, sleep=lambda: None)


class OneMember:
    """A group of one member in this process, or of none."""

    def __init__(self, member: Any, role: str, run: Run) -> None:
        link: Any = None
        self._member, self._context = member, WorkerContext(JobInfo("local", "local", run), role, 0, 1, link)

    def __len__(self) -> int:
        return int(self._member is not None)

    def options(self, **_: Any) -> OneMember:
        return self

    def call(self, method: str, *args: Any, _scatter: bool = False) -> Done:
        with acting_as(self._context):
            return Done([getattr(self._member, method)(*(arg[0] for arg in args) if _scatter else args)])


class Done:
    """A result that is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


def _recorded(response: str) -> float:
    raise AssertionError("recorded samples are scored")

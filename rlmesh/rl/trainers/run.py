"""`Run`: the settings of a training, and the job that carries it out.

::

    run = Run(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        data="data/train.parquet",
        rewards=[Reward(gsm8k.compute_score)],
        algorithm=GRPO(samples=8),
        steps=200,
    )
    result = run.submit("gsm8k")
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rlmesh.errors import UsageError
from rlmesh.rl.evaluation.settings import RewardAlarmSettings, SampleSettings, ValidationSettings
from rlmesh.rl.faults import MOST_PROCESSES, MOST_THREADS, CheckedKeywords, too_large, too_small
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.rewards.reward import Reward
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings
from rlmesh.rl.rollout.pipeline import Pipeline
from rlmesh.rl.trainers.progress import MODEL, SUMMARY, finished_steps
from rlmesh.rl.trainers.settings import (
    ActorSettings,
    CriticSettings,
    Engine,
    Placement,
    ReferenceSettings,
    RolloutSettings,
    apply_overrides,
    checked,
    wrong_types,
)

if TYPE_CHECKING:
    from rlmesh import DLJob
    from rlmesh.rl.algorithms.protocol import Algorithm
    from rlmesh.rl.data.dataset import RLHFDataset
    from rlmesh.rl.data.loader import Mixture
else:
    Algorithm = Any  # settings are made and checked without torch

__all__ = ["Run", "RunResult"]

logger = logging.getLogger(__name__)

MADE_BY = {
    "actor": "ActorSettings", "critic": "CriticSettings", "reference": "ReferenceSettings",
    "rollout": "RolloutSettings", "episode": "EpisodeSettings", "evaluation": "ValidationSettings",
    "sample_files": "SampleSettings", "reward_alarm": "RewardAlarmSettings",
}  # fmt: skip
"""The class of each section."""
NEEDS = ("critic", "greedy", "reference")


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        run_dir: the run directory, with logs, metrics, checkpoints and the exported model.
        model: the folder of the trained policy, which ``from_pretrained`` reads.
        metrics: the metrics of the last report, by name.
    """

    run_dir: Path
    model: Path
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Run(CheckedKeywords):
    """The settings of a training.

    Attributes:
        model: a folder or a hub name of a causal language model with its tokenizer.
        data: files or rows of prompts (:class:`rlmesh.rl.data.dataset.RLHFDataset`), or files and their weights in a
            mixture (:func:`rlmesh.rl.data.loader.load_prompts`).
        algorithm: such as ``GRPO(samples=8)``.
        rewards: functions, `Reward` and `RewardModel` objects, that score responses; for algorithms that read rewards.
        steps: training steps; each takes one batch of prompts.
        validation: prompts that are never trained on; of a mapping of files, all prompts of all files.
        validate_every: steps between validations; 0: before the first and after the last step only.
        evaluation: how validation prompts are sampled and counted.
        sample_files: which samples are kept in the run directory.
        reward_alarm: thresholds of the alarm that the policy seems to exploit a reward.
        trackers: names of trackers that show the metrics: ``wandb``, ``mlflow``, ``trackio``, each also with a project
            (``wandb:PROJECT``), or ``module:Class``; see `rlmesh.Trackers`. TensorBoard files are always written.
        batch_size: prompts per step.
        max_prompt_tokens: longer prompts are left out, and counted.
        prompt_key: the column of the prompts.
        template: further arguments of the tokenizer's chat template, such as ``{"enable_thinking": False}``.
        pipeline: how far sampling may be ahead of training: ``"sync"``, ``"one-step-off"`` or
            ``"async(staleness=2)"``; see docs/pipelines.md.
        train: the training engine: ``ddp``, ``fsdp2``, ``zero1``, ``zero2`` or ``zero3``.
        actor: the policy in training.
        rollout: the engines that sample; a text names the engine.
        environment: a class or function that makes a `TextEnvironment` for each episode.
        tools: functions, or `Tool` objects, that the policy may call.
        agent: a function that plays an episode by requests to an OpenAI-compatible endpoint. A run has an environment,
            tools, an agent, or none of them: then each prompt gets one response.
        episode: limits of episodes of several turns.
        critic: the value function in training, for an algorithm that needs one.
        reference: the policy from which a divergence is measured, or the teacher of a distillation.
        placement: the devices of the roles. ``"separate"``: each member has one of its own. ``"shared"``: all roles
            share all devices, and take turns. ``"fused"``: one process per device trains, samples and holds the
            reference, and a critic takes turns with it. ``"auto"``: separate if there are enough GPUs, else shared.
        devices_per_node: GPUs of each node; 0: train on CPUs.
        nodes: machines of the job.
        seed: seed of the order of prompts and of sampling.
        save_every: steps between checkpoints. The last step has one too.
        keep_last: number of the latest checkpoints that are kept.
        keep_best: metric of the best checkpoint, which is kept too, such as ``"val/reward_mean"``; with ``-`` before
            it, the smallest value is the best. Empty: only the latest checkpoints are kept.
        resume: ``"auto"``: continue from the latest checkpoint of the run directory, if it has one. ``"must"``: refuse
            to start without one. ``"never"``: refuse to start with one.
        restore: the checkpoint of another run with which this run begins: its folder ``checkpoints/step-…``, or its run
            directory.
        restore_parts: the parts to load: ``weights`` and ``optimizer`` for all models in training that the checkpoint
            has, ``actor.weights`` and so on for one model.
        examine: print this many scored responses of each step.
        reward_workers: number of processes that score.

    Raises:
        UsageError: lists all faults of the settings.
    """

    model: str
    data: Any
    algorithm: Algorithm
    rewards: Sequence[Reward | RewardModel | Callable[..., Any]] = ()
    steps: int = 100
    validation: Any = None
    validate_every: int = 0
    evaluation: ValidationSettings = field(default_factory=ValidationSettings)
    sample_files: SampleSettings = field(default_factory=SampleSettings)
    reward_alarm: RewardAlarmSettings = field(default_factory=RewardAlarmSettings)
    trackers: Sequence[str] = ()
    batch_size: int = 16
    max_prompt_tokens: int = 1024
    pipeline: str = "sync"
    train: Engine = "ddp"
    actor: ActorSettings = field(default_factory=ActorSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    environment: Any = None
    tools: Sequence[Any] = ()
    agent: Any = None
    episode: EpisodeSettings = field(default_factory=EpisodeSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    placement: Placement = "auto"
    devices_per_node: int = 0
    nodes: int = 1
    seed: int = 0
    save_every: int = 50
    keep_last: int = 2
    keep_best: str = ""
    resume: Literal["auto", "never", "must"] = "auto"
    restore: str | Path | None = None
    restore_parts: Sequence[str] = ("weights",)
    examine: int = 0
    reward_workers: int = 2
    prompt_key: str = "prompt"
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: Any = self.rollout
        if isinstance(given, str):
            object.__setattr__(self, "rollout", RolloutSettings(engine=given))  # type: ignore[arg-type]
        rewards: Any = self.rewards
        kinds = Reward | RewardModel
        alone = callable(rewards) or isinstance(rewards, kinds) or not isinstance(rewards, list | tuple | None)
        listed = [rewards] if alone else rewards or ()
        made = tuple(one if isinstance(one, kinds) else Reward(one) for one in listed)
        object.__setattr__(self, "rewards", made)
        if faults := [*self._faults()]:
            raise UsageError("Run: " + "\n  ".join(faults))

    @property
    def trains(self) -> bool:
        """True if the run trains; an evaluation only samples."""
        return True

    @property
    def scored(self) -> tuple[Reward | RewardModel, ...]:
        """The rewards as `Reward` and `RewardModel` objects."""
        return tuple(one for one in self.rewards if isinstance(one, Reward | RewardModel))

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, **settings: Any) -> Run:
        """A run whose settings the command line may change: ``--set actor.lr=2e-6``.

        Args:
            argv: words of the command line; ``None``: the words of this program.
            settings: see the class.

        Raises:
            UsageError: lists all faults of settings and overrides.
        """
        parser = argparse.ArgumentParser(description="Train a language model.")
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
        options = parser.parse_args(sys.argv[1:] if argv is None else argv)
        return apply_overrides(cls(**settings), options.set)

    @classmethod
    def from_config(cls, config: Any, overrides: Sequence[str] = (), *, source: str | None = None) -> Run:
        """A run from a file, or from values with the keys of this class or of another library.

        Args:
            config: a YAML, JSON or Python file, a mapping, a dataclass, or a configuration of OmegaConf or Hydra.
                Algorithm and rewards go by name: ``{"algorithm": {"name": "grpo"}, "rewards": ["gsm8k"], …}``.
            overrides: ``section.key=value`` texts with the keys of this class, which replace values of ``config``.
            source: the library whose keys ``config`` has: ``"verl"``, ``"trl-grpo"``, ``"trl-ppo"``, ``"trl-sft"``,
                ``"trl-dpo"`` or ``"trl-reward"``. Keys without a counterpart are named in the log. None: it has the
                keys of this class.

        Raises:
            UsageError: lists all faults.
        """
        if source is not None:
            from rlmesh.rl.migration.reading import load_converted

            run: Run
            run, conversion = load_converted(config, source, overrides)
            logger.warning("%s", conversion.report())
            return run
        from rlmesh.rl.trainers.config_files import load_run

        return load_run(config, overrides)

    def _faults(self) -> Iterator[str]:
        hollow = [name for name in MADE_BY if not dataclasses.is_dataclass(getattr(self, name))]
        hollow += [name for name in MADE_BY if isinstance(getattr(self, name), type)]
        yield from wrong_types(self, "", but=hollow)
        yield from self._data_faults()
        wrong = [f"{name}={getattr(self, name)!r} must be {MADE_BY[name]}(…)" for name in hollow]
        if isinstance(self.algorithm, type) or getattr(self.algorithm, "needs", None) is None:
            wrong.append(f"algorithm={self.algorithm!r}: expected an Algorithm, such as GRPO(samples=8)")
        yield from wrong
        sections: dict[str, Any] = {name: getattr(self, name) for name in MADE_BY if name not in hollow}
        for name, section in sections.items():
            bad = [*wrong_types(section, f"{name}.")]
            yield from bad or (f"{name}.{fault}" for fault in section.faults())
        if not wrong:  # The other checks read these settings.
            yield from self._whole_faults()

    def _whole_faults(self) -> Iterator[str]:
        """Faults of settings that have the right types."""
        if self.trackers and isinstance(self.trackers, Sequence):
            from rlmesh import Trackers

            yield from (f"trackers: {fault}" for fault in Trackers.faults(self.trackers))
        for name in ("actor", "critic"):
            count, size = getattr(getattr(self, name), "minibatches", 1), getattr(self, "batch_size", 1)
            if checked(count, int) and checked(size, int) and count > size >= 1:
                yield f"{name}.minibatches={count} must be ≤ batch_size={self.batch_size}"
        yield from EpisodePlan.faults(self)
        yield from self._deadline_faults()
        if not self.rewards and getattr(self.algorithm, "rewarded", True):
            yield "rewards: give at least one reward"
        yield from self._given_faults()
        if isinstance(self.pipeline, str):
            yield from self._pipeline_faults()
        counts = ("steps", "batch_size", "max_prompt_tokens", "save_every", "keep_last", "nodes", "reward_workers")
        yield from too_small(self, 1, *counts)
        yield from too_small(self, 0, "validate_every", "devices_per_node", "examine", "seed")
        yield from too_large(self, MOST_PROCESSES, "nodes")
        yield from too_large(self, MOST_THREADS, "devices_per_node", "reward_workers")
        yield from too_large(self, 2**63 - 1, "seed")
        if lacking := sorted(self.algorithm.needs - set(NEEDS)):
            known, lacked = ", ".join(NEEDS), " and ".join(lacking)
            yield f"{type(self.algorithm).__name__} needs {lacked}, which no role gives: there is {known}"
        else:
            yield from self._placement_faults()
        if self.trains and getattr(self.reference, "model", None) and "reference" not in self.algorithm.needs:
            yield f"reference.model={self.reference.model!r}: {type(self.algorithm).__name__} measures no divergence"
        if self.train not in get_args(Engine):
            yield f"train={self.train!r}: the engines are {', '.join(get_args(Engine))}"

    def _data_faults(self) -> Iterator[str]:
        """One sentence per data that can be no files and no rows."""
        for name in ("data", "validation"):
            given, what = getattr(self, name), "a file, a folder, a list of files or of rows, or a mapping of files"
            if given is None and name == "validation":
                continue
            if not isinstance(given, str | Path | Mapping | Sequence):
                yield f"{name}={given!r} must be {what}"
            elif isinstance(given, list | tuple):
                kinds = {isinstance(one, Mapping) for one in given}
                wrong = [one for one in given if not isinstance(one, str | Path | Mapping)]
                if wrong:
                    yield f"{name}: {wrong[0]!r} is no row and no file: a row is a mapping of columns, such as 'prompt'"
                elif len(kinds) > 1:
                    yield f"{name} has both rows and files: give one of them"

    def _deadline_faults(self) -> Iterator[str]:
        """A fault if training gives up waiting sooner than an episode can end."""
        if self.environment is None and not self.tools and self.agent is None:
            return
        waits_s = getattr(self.rollout, "deadline_s", None)
        episode_s = getattr(self.episode, "episode_timeout_s", None)
        if isinstance(waits_s, float | int) and isinstance(episode_s, float | int) and 0 < waits_s <= episode_s:
            yield f"rollout.deadline_s={waits_s} must be > episode.episode_timeout_s={episode_s}"
        limit_s, turn_s = getattr(self.rollout, "time_limit_s", 0), getattr(self.episode, "turn_timeout_s", None)
        if isinstance(limit_s, float | int) and isinstance(turn_s, float | int) and 0 < turn_s <= limit_s:
            yield (
                f"rollout.time_limit_s={limit_s} must be < episode.turn_timeout_s={turn_s}: turns would fail before "
                "they are cut off"
            )

    def _given_faults(self) -> Iterator[str]:
        responses, name = getattr(self.algorithm, "responses", "sampled"), type(self.algorithm).__name__
        if responses == "sampled":
            if not getattr(self.algorithm, "rewarded", True) and getattr(self.rollout, "dynamic_sampling", False):
                yield f"rollout.dynamic_sampling compares rewards, which {name} does not read"
            return
        if self.pipeline != "sync":
            yield f"pipeline={self.pipeline!r}: {name} samples nothing, so there is nothing to be ahead with"
        if responses != "ranked" and getattr(self.rollout, "temperature", 1.0) != 1.0:
            yield (
                f"rollout.temperature={self.rollout.temperature}: {name} samples nothing, and its loss is that of the "
                "model itself, at temperature 1; leave it out"
            )
        if self.rewards:
            yield f"rewards: {name} learns from the responses of the data, which are not scored; leave rewards out"
        if self.placement == "fused":
            yield f"placement='fused': {name} samples nothing, so there is nothing to fuse"
        steps = [f"actor.{key}" for key in ("epochs", "minibatches") if getattr(self.actor, key, 1) != 1]
        if responses != "given" and steps:
            yield f"{' and '.join(steps)} must be 1: the gradient of {name} is exact for one optimizer step per batch"

    def _pipeline_faults(self) -> Iterator[str]:
        try:
            ahead = self.schedule.staleness
        except UsageError as error:
            yield str(error)
            return
        if ahead and self.placement in ("shared", "fused"):
            yield (
                f"pipeline={self.pipeline!r} samples while it trains, so engines need devices of their own: set "
                f"placement='separate', not {self.placement!r}, or pipeline='sync'"
            )
        samples = getattr(self.algorithm, "samples", 2)
        if getattr(self.rollout, "dynamic_sampling", False) is True and samples == 1:
            yield "rollout.dynamic_sampling compares the responses of a prompt: algorithm.samples must be ≥ 2"

    def _placement_faults(self) -> Iterator[str]:
        if self.placement not in get_args(Placement):
            yield f"placement={self.placement!r}: there is {', '.join(map(repr, get_args(Placement)))}"
            return
        engines, ranks = getattr(self.rollout, "engines", None), getattr(self.actor, "ranks", None)
        if self.placement == "fused" and engines != ranks:
            yield (
                f"placement='fused': each of the actor's ranks has an engine, so rollout.engines="
                f"{engines} must be actor.ranks={ranks}"
            )
        elif self.placement == "auto" and self.placed == "shared" and self.schedule.staleness:
            yield (
                f"pipeline={self.pipeline!r} samples while it trains, but with {self.devices} devices the roles share "
                "them: set devices_per_node higher, or pipeline='sync'"
            )

    def check(self) -> None:
        """Check model, tokenizer, data, and the rewards on row 0, before any process starts.

        Raises:
            UsageError: lists all faults.
        """
        from rlmesh.rl.trainers.preflight import check

        check(self)

    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    def dataset(self, tokenizer: Any, data: Any = None) -> RLHFDataset | Mixture:
        """The prompts of ``data``, all of them once; None: the training data, in which a mapping mixes files."""
        from rlmesh.rl.data.loader import load_prompts

        chosen = self.data if data is None else [*data] if isinstance(data, Mapping) else data
        plan = EpisodePlan.of(self)
        tools = {"tools": [tool.schema for tool in plan.tools]} if plan is not None and plan.tools else {}
        return load_prompts(
            chosen, tokenizer, seed=self.seed, prompt_key=self.prompt_key, max_prompt_tokens=self.max_prompt_tokens,
            template={**tools, **self.template},
        )  # fmt: skip

    @property
    def response_tokens(self) -> int:
        """The most tokens that follow a prompt in an episode."""
        return self.rollout.max_tokens if EpisodePlan.of(self) is None else self.episode.max_tokens

    def job(self) -> DLJob:
        """The job of this run: the trainer, and the roles that its settings ask for."""
        from rlmesh.rl.trainers.job import build

        return build(self)

    @property
    def schedule(self) -> Pipeline:
        """The rules of ``pipeline``."""
        return Pipeline.parse(self.pipeline)

    @property
    def reward_models(self) -> tuple[RewardModel, ...]:
        """The rewards that are reward models; each has a role of its own."""
        return tuple(one for one in self.scored if isinstance(one, RewardModel))

    @property
    def devices(self) -> int:
        """The number of GPUs of all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def placed(self) -> Placement:
        """The placement, with ``"auto"`` decided."""
        if self.placement != "auto":
            return self.placement
        needs, responses = self.algorithm.needs, self.algorithm.responses
        wanted = self.actor.ranks + self.rollout.engines * (responses == "sampled")
        wanted += self.critic.ranks * ("critic" in needs and responses != "ranked") + ("reference" in needs)
        wanted += sum(model.members for model in self.reward_models)
        return "shared" if 0 < self.devices < wanted else "separate"

    def submit(self, name: str = "run", **options: Any) -> RunResult:
        """Check the settings, run the job, and wait for its end.

        Args:
            name: name of the job.
            options: further arguments of `DLJob.submit`.

        Raises:
            UsageError: something is wrong with the settings; no process was started.
            JobFailed: the job failed; the error names the root cause.
        """
        self.check()
        from rlmesh.rl.checkpoints.resuming import before_start  # loads torch, which the check may not need

        job = self.job()
        run_dir = job.known_run_dir(options.get("run_dir"))
        if before_start(self, run_dir) and run_dir is not None:
            return result_of_complete(run_dir)
        result = job.submit(name, **{"trackers": self.trackers, **options})
        return result_of(Path(result.run_dir))

    def here(self, name: str = "run", run_dir: str | Path | None = None) -> RunResult:
        """Check the settings, and run everything in this process, for debugging. Only rewards have processes of their
        own.

        There is one rank and one engine, whatever the settings say: the results are those of such a job. A run
        directory with a checkpoint is continued.

        Args:
            name: name of the new run directory.
            run_dir: the run directory; ``None``: a new one in ``runs``.

        Raises:
            UsageError: something is wrong with the settings.
        """
        from rlmesh.rl.checkpoints.resuming import before_start
        from rlmesh.rl.trainers.here import run_here

        self.check()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / f"{name}-here-{stamp}" if run_dir is None else Path(run_dir)
        if before_start(self, folder if run_dir is not None else None):
            return result_of_complete(folder)
        return run_here(self, folder, name)


def result_of(run_dir: Path) -> RunResult:
    """The result of a run, read from its run directory."""
    summary = json.loads((run_dir / SUMMARY).read_text())
    return RunResult(run_dir, run_dir / MODEL, summary["metrics"])


def result_of_complete(run_dir: Path) -> RunResult:
    """The result of a run that is complete already; prints this for people."""
    result = result_of(run_dir)
    print(f"already complete: {finished_steps(run_dir)} steps are done; the policy is in {result.model}", flush=True)
    return result

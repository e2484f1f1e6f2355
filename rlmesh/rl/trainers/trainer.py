"""The training loop. It fits on one screen, and is meant to be copied and changed: see `Trainer.fit`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlmesh import RoleGroup, WeightSync, current_worker, private_files
from rlmesh.errors import CallError, SourceRestarted, UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.algorithms.protocol import Evaluated, TokenWeights, weighed
from rlmesh.rl.checkpoints.resuming import TrainerCheckpoints
from rlmesh.rl.checkpoints.state import seed_generators
from rlmesh.rl.data.dataset import Prompt
from rlmesh.rl.data.loader import PromptLoader
from rlmesh.rl.drift import DriftAlarm, drift
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.evaluation.saved_run import remember
from rlmesh.rl.evaluation.validation import Validation
from rlmesh.rl.packing import Packs, Tokens
from rlmesh.rl.reading.phases import StepPhases
from rlmesh.rl.rewards.hacking import RewardAlarm
from rlmesh.rl.rewards.reward import Reward
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.roles.defaults import keep_objects, run_settings
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.episodes.spreading import EpisodeSpread, episode_report
from rlmesh.rl.rollout.requests import requests_of
from rlmesh.rl.rollout.role_engines import PUSHES, OwnSampling, push_to_all, serving
from rlmesh.rl.rollout.run_sampling import RunSampling, role_engines
from rlmesh.rl.samples.writer import SampleWriter
from rlmesh.rl.trainers import batches
from rlmesh.rl.trainers.progress import MODEL, SUMMARY, finished_steps, trained_role_restarted
from rlmesh.rl.trainers.run import result_of_complete
from rlmesh.rl.types import Episode, Group, Outcome, Score

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["Trainer"]

UNCORRECTED = "samples of older weights are trained on as they are; set algorithm.correction=token to weigh them"


class Trainer:
    """Drives the other roles through a training. Override a stage of `fit` to change it."""

    def setup(self) -> None:
        self.settings: Run = run_settings()
        self.run_dir = Path(current_worker().run_dir)
        remember(self.run_dir, self.settings)
        self.tokenizer = self.settings.tokenizer()
        self.algorithm = self.settings.algorithm
        self.holder: Any = None
        self.rewards = Rewards(
            self.settings.scored, self.tokenizer, workers=self.settings.reward_workers,
            examine=self.settings.examine if self.settings.schedule.drains else 0, group=self.group,
            required=self.algorithm.rewarded, prompt_key=self.settings.prompt_key,
        )  # fmt: skip
        self.validation_rewards = self.rewards
        data = self.settings.dataset(self.tokenizer)
        self.tell(f"data: {data.counts}")
        if self.settings.schedule.staleness and getattr(self.algorithm, "correction", True) is None:
            self.tell(f"pipeline={self.settings.pipeline!r}: {UNCORRECTED}")
        self.loader = PromptLoader(data, self.settings.batch_size, seed=self.settings.seed)
        self.buffer = self.make_buffer(self.loader)
        self.samples = SampleWriter(self.run_dir, self.settings.sample_files, self.text_of)
        self.validation = Validation(self)
        self.alarm, self.phases = DriftAlarm(self.settings.actor.precision), StepPhases()
        self.reward_alarm = RewardAlarm(self.settings.reward_alarm, self.rewards, self.run_dir, self.tell)
        self.version, self.last, self.stopped = 0, dict[str, float](), False
        self.checkpoints = TrainerCheckpoints(
            self.settings, self.run_dir, roles=self.parts,
            objects=self.stateful, position=self.loader.position, tell=self.tell,
            prompts_rounded_down=getattr(self.loader.data, "prompts_rounded_down", None),
        )  # fmt: skip
        keep_objects(seldom=True)

    def teardown(self) -> None:
        self.checkpoints.writer.stop()
        self.buffer.close()
        self.rewards.close()
        self.validation_rewards.close()
        self.samples.close()

    def make_buffer(self, loader: PromptLoader) -> Any:
        """Make the buffer between sampling and training: a `RunSampling`, or an object with its methods."""
        rewarded = self.algorithm.rewarded
        return RunSampling(
            self.settings, loader, lambda groups: self.score(self.rewards, groups),
            lambda one: self.rewards.total(one) if rewarded else Score(0.0), self.run_dir,
        )  # fmt: skip

    def run(self) -> None:
        if finished_steps(self.run_dir) >= self.settings.steps:
            result_of_complete(self.run_dir)
            return
        self.fit()
        self.buffer.close()
        self.hold(None)
        if self.engines is not self.actor:
            self.weight_sync.close()
        self.checkpoints.close()
        if not self.stopped:
            self.export()

    def fit(self) -> None:
        """Make the steps until the run or the job ends. If a model in training restarts, all of them return to one
        checkpoint."""
        ready = False
        while not ready or self.version < self.settings.steps:
            try:
                if ready:
                    self.step(self.version + 1)
                    if self.stops():
                        return
                else:
                    self.begin()
                    ready = True
            except (CallError, WeightSyncError) as error:
                if not isinstance(error, SourceRestarted) and not trained_role_restarted():
                    raise
                ready = False

    def step(self, step: int) -> None:
        """Make a step: take scored samples, evaluate, train, save, publish, report. Engines sample for later steps
        meanwhile, as far as the pipeline allows."""
        self.phases.begin()
        seed_generators(self.settings.seed, step, ("TRAINER",))
        groups = self.buffer.take(step)
        self.phases.end("wait")
        if not self.settings.schedule.drains:  # groups are scored one by one
            self.rewards.show(groups, self.settings.examine)
        self.validation.begin()
        packs, batch = self.evaluate(groups)
        self.phases.end("evaluate")
        weights = weighed(self.algorithm, batch)
        metrics = self.train(packs, batch, weights, lambda: self.record(step, groups, batch, weights))
        self.phases.end("train")
        self.version = step
        self.buffer.trained(step)
        self.phases.end("drain")
        metrics |= self.save()
        self.phases.end("save")
        self.validation.end()
        self.phases.end("validation")
        self.publish()
        self.phases.end("push")
        self.finish(step, metrics | self.buffer.report() | self.phases.report())
        self.buffer.advance(step)
        self.validation.begin(ahead=True)

    # Stages of a step.

    def connect(self) -> None:
        """Let the buffer sample with the engines or, if the trainer has a `draw` of its own, with `draw`."""
        run, in_turn, own = self.settings, self.in_turn, self.samples_itself
        group, sync = self.group("ROLLOUT") or self.actor, None if in_turn or own else self.weight_sync
        self.buffer.connect(
            OwnSampling(lambda prompts, seed: self.generate(prompts, seed=seed))
            if own else role_engines(run, group, in_turn=in_turn, sync=sync),
            background=run.schedule.staleness > 0 and not in_turn and not own, revive=self.push_again,
        )  # fmt: skip

    def play(
        self, prompts: Sequence[list[int]], rows: Sequence[Mapping[str, Any]], *, greedy: bool = False, seed: int = 0,
        temperature: float | None = None,
    ) -> list[list[Episode]]:  # fmt: skip
        """The episodes of each prompt: one, or one per branch that an agent opened. See `generate`."""
        if self.episodes is None:
            found = self.generate(prompts, greedy=greedy, seed=seed, temperature=temperature)
            return [[episode] for episode in found]
        return self.episodes.make(prompts, rows, self.sampling(greedy=greedy, seed=seed, temperature=temperature))

    def sampling(self, *, greedy: bool, seed: int, temperature: float | None) -> SamplingParams:
        """Parameters of sampling: greedy, or at ``temperature`` (None: the temperature of training)."""
        params = self.settings.rollout.params(greedy=greedy, seed=seed)
        return params if temperature is None or greedy else replace(params, temperature=temperature)

    def generate(
        self, prompts: Sequence[list[int]], *, greedy: bool = False, seed: int = 0, temperature: float | None = None
    ) -> list[Episode]:
        """One episode per prompt, from all engines; greedy, or at ``temperature`` (None: that of training)."""
        params = self.sampling(greedy=greedy, seed=seed, temperature=temperature)
        for _ in range(PUSHES):
            try:
                return self.draw(prompts, params)
            except WeightsNotReady:
                self.push_again()  # an engine restarted, or slept, since the push
        raise RuntimeError(f"an engine has no weights after {PUSHES} pushes")

    def draw(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Episode]:
        """One episode per prompt, each with its own seed, from the engines with their present weights.

        Raises:
            WeightsNotReady: an engine has no weights.
        """
        method, requests = "sample_in_turn" if self.in_turn else "sample", requests_of(prompts, params.seed or 0)
        found = self.serving().call_batch(method, len(requests), requests, params)
        return [Episode.of(samples[0]) for samples in found]

    def score(self, rewards: Rewards, groups: Sequence[Group]) -> list[Group]:
        """Score all episodes; returns the groups with the outcome of each reward."""
        if self.settings.reward_models:
            self.hold(None)  # a reward model may need the devices
        return rewards.score(groups)

    def evaluate(self, groups: Sequence[Group]) -> tuple[dict[str, list[Packs]], Evaluated]:
        """Pack the groups, and ask the roles for what the algorithm needs: log-probabilities, values, greedy rewards.

        Returns: the packs of each model in training (``actor``, ``critic``), and the batch with the roles' answers.
        """
        episodes = Group.episodes_of(groups)
        numbers = [number for number, group in enumerate(groups) for _ in group.episodes]
        packs = {
            name: batches.packs_of(
                episodes, numbers, minibatches=section.minibatches, token_budget=section.token_budget, ranks=len(role)
            )
            for name, role, section in self.trained()
        }
        tokens = Tokens.of(episodes)
        mask = torch.from_numpy(tokens.mask)
        totals = [self.rewards.total(episode) for episode in episodes]
        greedy = self.greedy_outcomes(groups) if "greedy" in self.algorithm.needs else None
        calls: dict[str, tuple[Packs, Any]] = {}

        def ask(column: str, role: Any, method: str, parts: list[Packs], *given: Any) -> None:
            own = batches.joined(parts)
            calls[column] = own, self.ask(role, method, own, *given)

        self.hold(self.actor)
        needs = self.algorithm.needs
        if "reference" in needs and self.reference is self.actor:
            ask("ref_log_probs", self.actor, "reference_log_probs", packs["actor"])
        # The old log-probabilities cannot be computed after the first optimizer step of a pass.
        if self.algorithm.reads_log_probs or self.settings.actor.minibatches > 1:
            ask("log_probs", self.actor, "log_probs", packs["actor"], self.version)
        if "reference" in needs and self.reference is not self.actor:
            self.hold(None)
            ask("ref_log_probs", self.reference, "reference_log_probs", packs["actor"])
        if "critic" in needs:
            self.hold(None)
            ask("values", self.critic, "values", packs["critic"], self.version)
        found = {
            column: batches.matrix_of(mask, own, [one for rows in call.result() for one in rows])
            for column, (own, call) in calls.items()
        }
        return packs, batches.evaluated_of(episodes, tokens, numbers, totals, greedy, found, self.version)

    def greedy_outcomes(self, groups: Sequence[Group]) -> list[Outcome]:
        """The reward of a greedy response to each group's prompt."""
        # The prompt of an episode also has what its environment said first, which it says again to a new episode.
        prompts, rows = [self.loader.prompt(group.key) for group in groups], [group.row for group in groups]
        episodes = self.play([prompt.ids.tolist() for prompt in prompts], rows, greedy=True)
        made = [Group(group.key, (one[0],), group.row) for group, one in zip(groups, episodes, strict=True)]
        return [self.rewards.total(episode) for episode in Group.episodes_of(self.score(self.rewards, made))]

    def ask(self, role: Any, method: str, packs: Packs, *given: Any) -> Any:
        """Call a method of all members of a role. Each gets the packs of its rank or, if the packs were made for
        another number of ranks, an equal part of them. ``given`` is the same for all."""
        shares = batches.parts_of(packs, len(role))
        return role.call(method, shares, *([each] * len(shares) for each in given), _scatter=True)

    def train(
        self, packs: dict[str, list[Packs]], batch: Evaluated, weights: TokenWeights,
        meanwhile: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, float]:  # fmt: skip
        """Make the optimizer steps of all epochs. Returns the roles' metrics, the gap between the log-probabilities of
        rollout engine and actor, and the metrics of ``meanwhile``, which is called while the models train."""
        # The actor updates last: on shared devices, its turn is right before the push.
        calls = []
        for name, role, section in reversed(self.trained()):
            steps = [batches.shares_of(one, batch, weights, minibatches=section.minibatches) for one in packs[name]]
            by_rank = [list(own) for own in zip(*steps, strict=True)]
            calls.append(role.call("update", by_rank, [self.version] * len(role), _scatter=True))
        # The actor answers this after the update, without another turn of the trainer.
        asked: Any = self.actor.call("first_log_probs") if batch.log_probs is None else None
        metrics = {**meanwhile(), **batches.value_metrics(batch, weights), **weights.metrics}
        metrics |= batches.pack_metrics(packs["actor"], self.settings.actor.token_budget)
        reports, log_probs = [call.result()[0] for call in calls], batch.log_probs
        if log_probs is None:
            rows = [one for own in asked.result() for one in own]
            log_probs = batches.matrix_of(batch.mask, batches.joined(packs["actor"]), rows)
        reported = {name: value for report in reports for name, value in report.items()}
        return {**metrics, **reported, **self.gap(log_probs, batch)}

    def record(self, step: int, groups: Sequence[Group], batch: Evaluated, weights: TokenWeights) -> dict[str, float]:
        """Give the samples of a step to the thread that writes them, and check for reward alarms. Returns the metrics
        of samples and rewards."""
        self.samples.add(step, groups, self.rewards.total, advantages=batches.advantages_of(groups, batch, weights))
        metrics = self.rewards.metrics(groups) | batches.lengths_of(groups)
        metrics |= episode_report(groups) if self.episodes is not None else {}
        return metrics | self.reward_alarm.check(step, groups)

    def gap(self, log_probs: torch.Tensor, batch: Evaluated) -> dict[str, float]:
        """The gap between the log-probabilities of rollout engine and actor, and whether it is an alarm."""
        # Older weights have other log-probabilities, which is no fault.
        same = batch.mask if batch.current is None else batch.mask & batch.current.unsqueeze(1)
        alarms = self.alarm.check(drift(log_probs, batch.sampled_log_probs, same), version=self.version)
        if self.settings.schedule.staleness:
            alarms["off_policy_k3"] = drift(log_probs, batch.sampled_log_probs, batch.mask).k3
        return alarms

    def save(self, *, now: bool = False) -> dict[str, float]:
        """Begin a checkpoint of all models in training if this step is to have one, or ``now``; `finish` completes it
        in the background. Returns metrics: the pause of training, and the number of failed checkpoints."""
        step, writer = self.version, self.checkpoints.writer
        if step % self.settings.save_every and step != self.settings.steps and not now:
            return {}
        writer.begin(step)
        return {"save_pause_s": writer.pause_s} | ({"saves_failed": float(writer.failures)} if writer.failures else {})

    def publish(self) -> None:
        """Push the actor's weights to the engines, under the current version."""
        if self.engines is self.actor:
            self.hold(self.actor)
            self.actor.call("publish", self.version).result()
            return
        self._push(lambda: self.weight_sync.push(self.version).result())

    def push_again(self) -> None:
        """Push the current version to engines that do not serve it."""
        self.validation.require_foreground()
        self.hold(None)
        if self.engines is self.actor:
            self.publish()
        else:
            self._push(self.weight_sync.catch_up)

    def _push(self, push: Callable[[], object]) -> None:
        """Make a push; repeat it if an engine dies meanwhile: the next attempt leaves this engine out."""
        wait_s = self.settings.rollout.deadline_s
        push_to_all(push, lambda: self.hold(self.engines), lambda: self.hold(None), wait_s=wait_s)

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        """Validate and report, write to disk that the step is finished, and complete its checkpoint."""
        settings = self.settings
        if self.validation.due(step) and not self.validation.postpone(step):
            metrics |= self.validate()
        self.last = {name: value for name, value in metrics.items() if np.isfinite(value)}
        self.last["steps_lost"] = float(self.checkpoints.lost)
        current_worker().report(step=step, total_steps=settings.steps, **self.last)
        self.checkpoints.finish(step, self.last)

    def stops(self) -> bool:
        """True if the job stops after this step, for example because its time ends; the step then has a checkpoint."""
        if current_worker().step_boundary(self.version) is None:
            return False
        if self.checkpoints.writer.wait() and self.checkpoints.store.latest_step != self.version:
            self.save(now=True)
            self.checkpoints.finish(self.version, self.last)
        self.stopped = True
        return True

    def validate(self) -> dict[str, float]:
        """Metrics of a validation of the engines' weights; empty without validation data."""
        return self.validation.run(self.version)

    def export(self) -> None:
        """Write the trained policy to a folder, and the last metrics as JSON."""
        folder = self.run_dir / MODEL
        self.actor.call("export", str(folder)).result()
        self.tokenizer.save_pretrained(folder)
        summary = json.dumps({"steps": self.version, "metrics": self.last}) + "\n"
        private_files.write_whole(self.run_dir / SUMMARY, summary)

    # Roles, and restarts.

    def stateful(self) -> dict[str, Any]:
        """Objects by name; the states of those that are `Stateful` belong to checkpoints. Override this to add more."""
        own = {"buffer": self.buffer, "algorithm": self.algorithm, "alarm": self.alarm, "hacking": self.reward_alarm}
        inline = [one for one in self.settings.scored if isinstance(one, Reward) and one.inline]
        return {**own, **{f"reward {one.name}": one.function for one in inline}}

    def tell(self, text: str) -> None:
        """Print a text for people."""
        print(text, flush=True)

    def group(self, role: str) -> Any:
        """The members of a role; empty if the job has no such role."""
        return RoleGroup(role, optional=True)

    @cached_property
    def actor(self) -> Any:
        """The policy in training."""
        return self.group("ACTOR")

    @cached_property
    def critic(self) -> Any:
        """The value function in training; empty without one."""
        return self.group("CRITIC")

    @cached_property
    def engines(self) -> Any:
        """The members that sample: the rollout engines or, in a job without them, the actor's (`ActorRollout`)."""
        return self.group("ROLLOUT").options(idempotent=True) or self.actor

    def serving(self) -> Any:
        """The engines that serve the weights of the last push, without those that have restarted since."""
        return self.engines if self.in_turn else serving(self.engines, self.weight_sync)

    @cached_property
    def episodes(self) -> EpisodeSpread | None:
        """Plays episodes of several turns; None if each prompt gets one response."""
        plan = EpisodePlan.of(self.settings)
        return None if plan is None else EpisodeSpread(self.serving, self.push_again)

    @cached_property
    def reference(self) -> Any:
        """The members with the reference: its own role or, in a job without it, the actor's (`ActorRolloutRef`)."""
        return self.group("REFERENCE").options(idempotent=True) or self.actor

    def trained(self) -> list[tuple[str, Any, Any]]:
        """The models in training: name, members, settings.

        Raises:
            UsageError: the job lacks the critic that the algorithm needs.
        """
        found = [("actor", self.actor, self.settings.actor)]
        if "critic" in self.algorithm.needs:
            if not self.critic:
                raise UsageError(f"{type(self.algorithm).__name__} needs a critic: add .critic() to the job")
            found.append(("critic", self.critic, self.settings.critic))
        return found

    def parts(self) -> list[tuple[str, Any]]:
        """The parts of a checkpoint that have the models in training, and the members that write them."""
        return [(name, role) for name, role, _ in self.trained()]

    def hold(self, role: Any) -> None:
        """Let a role keep its shared devices until `hold` is called for another role or None."""
        if role is self.holder or not self.shares:
            return
        if self.holder is not None:
            self.holder.options(idempotent=True).call("release_devices").result()
        self.holder = None
        if role is not None:
            role.options(idempotent=True).call("hold_devices").result()
            self.holder = role

    @cached_property
    def shares(self) -> bool:
        """True if roles of this job share devices, and take turns on them."""
        return any(any(role.call("shares_devices").result()) for role in (self.actor, self.engines))

    @property
    def samples_itself(self) -> bool:
        """True if the trainer has a `draw` of its own, which samples in place of the engines."""
        return type(self).draw is not Trainer.draw

    @property
    def in_turn(self) -> bool:
        """True if the engines share their devices with other roles."""
        return self.engines is self.actor or self.shares

    def begin(self) -> None:
        """Bring all models in training to one step, publish the weights, and validate if the step lacks that."""
        before, self.holder = self.version, None
        self.connect()
        self.buffer.pause()
        self.validation.drop()
        if self.shares:
            for role in {id(role): role for role in (self.engines, self.actor)}.values():
                role.options(idempotent=True).call("release_devices").result()
        trained = [role for _, role, _ in self.trained()]
        reached = {steps for role in trained for steps in role.call("finished_steps").result()}
        self.version = self.checkpoints.step_after(reached)
        for call in [role.call("restore", self.version) for role in trained]:
            call.result()
        self.last = self.checkpoints.restore(self.version)
        if self.version < before:
            self.tell(f"back to step {self.version}: {before - self.version} steps were lost to a restart")
        self.publish()
        if self.version == 0 or self.validation.is_missing(self.version, self.last):
            self.last = self.validation.make_up(self.version, self.last)
        self.buffer.advance(self.version)

    @cached_property
    def weight_sync(self) -> WeightSync:
        """The weight sync from the actor's ranks to the engines that are not restarting now."""
        return WeightSync(self.actor, self.engines, allow_cast=self.settings.rollout.casts, wait_for_restarts=False)

    @cached_property
    def validation_prompts(self) -> list[Prompt] | None:
        """The prompts of the validation data; ``None`` without any."""
        if self.settings.validation is None:
            return None
        data = self.settings.dataset(self.tokenizer, self.settings.validation)
        return [data[place] for place in range(len(data))]

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, for samples that people read."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

"""`Validation`: validates the policy during a training, at once or while the next step trains."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rlmesh import current_worker
from rlmesh.errors import WeightsNotReady, WeightSyncError
from rlmesh.rl.evaluation.metrics import validation_metrics
from rlmesh.rl.rollout.role_engines import LOST, progress_of
from rlmesh.rl.rollout.silence import Silence
from rlmesh.rl.types import Group

if TYPE_CHECKING:
    from rlmesh.rl.trainers.trainer import Trainer

__all__ = ["Validation"]


LOOK_S = 1.0
"""Seconds between two checks of a validation that the trainer waits for."""
LONG_S = 600.0
"""Seconds after which a step that waits for the background validation logs this."""


class Validation:
    """Answers the validation prompts with the engines' weights, scores the responses, and reports the numbers.

    If engines have devices of their own, the validation of a step runs while the next step trains. It ends before the
    next push, so that one version of the weights samples all its responses. Its numbers are reported under the step of
    this version. In a pipeline that drains, it begins when the engines have sampled everything that they may sample
    before the push, so it does not change the samples to train on; in the asynchronous pipeline, both run at the same
    time. An engine that dies meanwhile may have no weights until the push; this validation is then left out, which the
    log says, and training goes on.

    Args:
        trainer: the trainer, whose methods sample, score and keep the responses.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._waiting: int | None = None
        self._running: tuple[int, Future[dict[str, float]]] | None = None
        self._thread: threading.Thread | None = None
        self._silence: Silence | None = None
        """Of the validation in the background."""

    def due(self, step: int) -> bool:
        """True if the weights of a step are validated."""
        run = self._trainer.settings
        if run.validation is None:
            return False
        return step in (0, run.steps) or bool(run.validate_every and step % run.validate_every == 0)

    def is_missing(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if the metrics of a step lack a validation that was due: it was left to the next step, and a restart or
        the end of the job came first."""
        return self.due(step) and not any(name.startswith("val/") for name in metrics)

    def run(self, step: int) -> dict[str, float]:
        """Validate the weights of a step, which the engines must serve now; the metrics, empty without validation
        data."""
        trainer = self._trainer
        run, prompts = trainer.settings, trainer.validation_prompts
        if prompts is None:
            return {}
        count, temperature = run.evaluation.samples, run.evaluation.temperature_of(run.rollout.temperature)
        asked = [prompt for prompt in prompts for _ in range(count)]
        played = trainer.play(
            [prompt.ids.tolist() for prompt in asked],
            [prompt.row for prompt in asked],
            greedy=temperature == 0,
            temperature=temperature,
            seed=run.seed,
        )
        episodes = [branches[0] for branches in played]
        if mixed := {version for one in episodes if (version := one.policy_version) not in (step, None)}:
            raise RuntimeError(f"validation of step {step}: sampled by versions {sorted(map(str, mixed))}")
        groups = [
            Group((0, prompt.index), tuple(episodes[place * count : (place + 1) * count]), prompt.row)
            for place, prompt in enumerate(prompts)
        ]
        rewards = trainer.validation_rewards
        if self._silence is not None:
            self._silence.answered()
        groups = trainer.score(rewards, groups)
        trainer.samples.add(step, groups, rewards.total, split="validation")
        found = {f"val/{name}": value for name, value in rewards.metrics(groups).items()}
        return found | validation_metrics(groups, rewards.total, right=run.evaluation.right)

    def make_up(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Validate the weights of a step after its report, and report the numbers with the step's other metrics: in
        views, the reports of a new process replace those of the one before. Returns all of them.

        Args:
            metrics: the metrics of the step.
        """
        found = {**metrics, **self._trainer.validate()}
        # What this report took is not what the step took.
        told = {name: value for name, value in found.items() if name != "step_time_s"}
        current_worker().report(step=step, total_steps=self._trainer.settings.steps, **told)
        return found

    # In the background.

    def postpone(self, step: int) -> bool:
        """Postpone the validation of a step, to run while the next step trains; False if this is not possible."""
        trainer = self._trainer
        run = trainer.settings
        possible = (
            run.evaluation.background
            and step < run.steps
            and not (run.schedule.staleness and trainer.samples_itself)
            and not trainer.shares
            and trainer.engines is not trainer.actor
            and "greedy" not in trainer.algorithm.needs
            # The checkpoint of the step needs the metric that decides which checkpoint is best.
            and not (trainer.checkpoints.writer.begun == step and run.keep_best.removeprefix("-").startswith("val/"))
        )
        if possible:
            self._waiting = step
        return possible

    def begin(self, *, ahead: bool = False) -> None:
        """Start the validation that was postponed, if there is one.

        Args:
            ahead: True if the engines sample for later steps; False if they are idle.
        """
        if self._waiting is None or ahead != (self._trainer.settings.schedule.staleness > 0):
            return
        step, self._waiting = self._waiting, None
        future: Future[dict[str, float]] = Future()
        self._running = step, future
        limit_s = self._trainer.settings.rollout.deadline_s
        self._silence = Silence(lambda: progress_of(self._trainer.engines), limit_s)

        def work() -> None:
            try:
                if ahead and not self._trainer.buffer.await_idle():
                    raise WeightsNotReady("the engines were not idle before the run went back, failed or ended")
                future.set_result(self.run(step))
            except BaseException as error:
                future.set_exception(error)

        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work,), name="validation", daemon=True)
        self._thread.start()

    def require_foreground(self) -> None:
        """Raise if called on the thread of a background validation: the actor has later weights, which it must not
        push.

        Raises:
            WeightsNotReady: this is that thread.
        """
        if threading.current_thread() is self._thread:
            raise WeightsNotReady("an engine was lost, and has no weights until the next push")

    def end(self) -> None:
        """Wait for the background validation, and report its metrics, or that it is missing because an engine died.

        Other errors of the validation are raised.
        """
        running, self._running = self._running, None
        if running is None:
            return
        step, future = running
        self._await(step, future)
        try:
            metrics = future.result()
        except (WeightSyncError, *LOST) as error:
            text = f"the validation of step {step} is missing, and training goes on: {error}"
            self._trainer.tell(text)
            current_worker().alarm(text)
            return
        current_worker().report(step=step, total_steps=self._trainer.settings.steps, **metrics)

    def drop(self) -> None:
        """Forget a postponed validation, and wait for a running one without reporting its metrics."""
        self._waiting = None
        running, self._running = self._running, None
        if running is not None:
            self._await(*running)
            running[1].exception()

    def _await(self, step: int, future: Future[dict[str, float]]) -> None:
        """Wait for a validation, and log it if the wait is long.

        Raises:
            TimeoutError: neither engines nor rewards made progress for ``rollout.deadline_s``.
        """
        silence, limit_s = self._silence, self._trainer.settings.rollout.deadline_s
        assert silence is not None
        what = f"the training waits for the validation of step {step}"
        began, told_s, told = time.perf_counter(), min(LONG_S, limit_s), False
        silence.begin()
        while futures.wait([future], min(LOOK_S, told_s / 4)).not_done:
            if not told and time.perf_counter() - began >= told_s:
                told = True
                current_worker().alarm(f"{what}, for more than {told_s:g} s")
            silence.look()
            if silence.seconds >= limit_s:
                raise TimeoutError(
                    f"{what}, in which nothing has moved for rollout.deadline_s={limit_s:g} s: an engine or a reward "
                    "hangs"
                )

"""`diagnose`: finds the bottleneck of a run in the reports of its steps, and the setting to change. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rlmesh.errors import UsageError
from rlmesh.rl.reading.steps import StepReported

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["Advice", "Diagnosis", "Part", "diagnose"]

Part = Literal["sampling", "scoring", "evaluating", "training", "pushing", "saving", "validating", "other"]
"""The parts of a step on the trainer's thread. Their times add up to the time of the step."""

MEANING: Mapping[Part, str] = {
    "sampling": "the trainer waits for responses",
    "scoring": "the trainer waits for rewards alone",
    "evaluating": "log-probabilities and values before the update",
    "training": "forward and backward passes, optimizer",
    "pushing": "weights to the engines",
    "saving": "checkpoints: the pause of training",
    "validating": "the step waits for a validation",
    "other": "data, weights of the loss, reports",
}
SMALL_PASS = 4096
"""A pass over fewer tokens is likely to be slowed by its fixed costs."""
ROOM, FULL = 0.75, 0.92
"""Passes may grow while less than ``ROOM`` of the memory is in use; above ``FULL`` a run is near its limit."""
GROWTH = 8
"""The largest factor by which an advice changes a number."""


OTHER_TRAINING = (
    "algorithm.kl", "algorithm.correction", "actor.lora.rank", "batch_size", "pipeline", "rollout.oversampling",
)  # fmt: skip
"""Settings that save time but change the training; a run that resumes refuses some of these changes."""


@dataclass(frozen=True)
class Advice:
    """A setting to change.

    Attributes:
        setting: the key, such as ``rollout.engines``.
        value: the proposed value.
        why: the reason, with figures.
    """

    setting: str
    value: str
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck of a run.

    Attributes:
        first, last: the first and the last step that count.
        count: the number of steps that count.
        step_s: the mean time of a step, in seconds.
        parts: the mean time of each part, in seconds.
        bottleneck: the part that takes most of the time.
        advice: what to change.
        notes: other things that cost time or samples, one sentence each.
    """

    first: int
    last: int
    count: int
    step_s: float
    parts: Mapping[Part, float]
    bottleneck: Part
    advice: Advice
    notes: Sequence[str]

    def __str__(self) -> str:
        lines = [f"steps {self.first} to {self.last} ({self.count}), {_seconds(self.step_s)} each:"]
        for part, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            share = seconds / self.step_s
            if share >= 0.005:
                lines.append(f"  {part:<11} {share:>4.0%}  {_seconds(seconds):>8}  {MEANING[part]}")
        share = self.parts[self.bottleneck] / self.step_s
        lines += [f"bottleneck: {self.bottleneck}, {share:.0%} of a step", f"change: {self.advice.setting}="]
        lines[-1] += f"{self.advice.value}"
        lines.append(f"  {self.advice.why}")
        return "\n".join([*lines, *(f"also: {note}" for note in self.notes)])


def diagnose(steps: Sequence[StepReported], run: Run | None = None) -> Diagnosis:
    """The bottleneck of the steps.

    The first step, in which processes warm up, is left out if there are others.

    Args:
        steps: the reports in order.
        run: the settings; ``None``: unknown, so that the advice names a direction instead of a value.

    Raises:
        UsageError: the reports have no times of phases.
    """
    chosen = list(steps[1:] if len(steps) > 2 else steps)
    if not any("time/train_s" in one.metrics for one in chosen):
        raise UsageError(
            "the reports have no times of phases (time/train_s): an older version, or a trainer of its own, wrote them"
        )
    figures = _Figures(chosen, steps)
    parts = figures.parts()
    bottleneck = max(parts, key=lambda part: parts[part])
    advice = _ADVICE[bottleneck](figures, parts, run)
    if advice.setting in OTHER_TRAINING:
        advice = replace(advice, why=f"{advice.why}; this changes what is trained, so begin a new run with it")
    return Diagnosis(
        chosen[0].step, chosen[-1].step, len(chosen), sum(parts.values()), parts, bottleneck, advice,
        tuple(_notes(figures, parts, run, bottleneck)),
    )  # fmt: skip


class _Figures:
    """Means over steps."""

    def __init__(self, chosen: Sequence[StepReported], every: Sequence[StepReported]) -> None:
        self.chosen = chosen
        self._before = {one.step: one for one in every}

    def mean(self, name: str, default: float = 0.0) -> float:
        """The mean of a metric over the steps that have it."""
        found = [one.metrics[name] for one in self.chosen if name in one.metrics]
        return sum(found) / len(found) if found else default

    def parts(self) -> dict[Part, float]:
        """The mean time of each part, in seconds."""
        count, validating, between = len(self.chosen), 0.0, 0.0
        for one in self.chosen:
            validating += one.metrics.get("time/validation_s", 0.0)
            since = one.metrics.get("time/between_s", 0.0)
            # The time between two steps contains the validation of the first one, unless it ran in the background.
            before = self._before.get(one.step - 1)
            if before is not None and before.validated:
                validating += since
            else:
                between += since
        waited, drained = self.mean("time/wait_s"), self.mean("time/drain_s")
        given = self.mean("buffer/trainer_wait_s", -1.0) < 0  # responses of the data need no sampling
        scoring = 0.0 if given else min(self.mean("buffer/scoring_wait_s"), waited + drained)
        found: dict[Part, float] = {
            "sampling": 0.0 if given else waited + drained - scoring,
            "scoring": scoring,
            "evaluating": self.mean("time/evaluate_s"),
            "training": self.mean("time/train_s"),
            "pushing": self.mean("time/push_s"),
            "saving": self.mean("time/save_s"),
            "validating": validating / count,
        }
        whole = self.mean("step_time_s") + (validating + between) / count - self.mean("time/validation_s")
        return {**found, "other": max(whole - sum(found.values()), 0.0)}


Parts = Mapping[Part, float]


def _sampling(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    whole, waits = sum(parts.values()), parts["sampling"]
    rest, busy = whole - waits, figures.mean("buffer/engines_busy")
    engines = round(figures.mean("buffer/engines", 1.0))
    waited = f"the trainer waits {_seconds(waits)} of {_seconds(whole)} for responses"
    pipeline, placed = (run.schedule, run.placed) if run is not None else (None, "separate")
    dropped, batch = figures.mean("buffer/dropped"), run.batch_size if run is not None else 0
    if run is not None and dropped >= batch and run.rollout.oversampling == 1:
        sampled = dropped + batch
        return Advice(
            "rollout.oversampling", f"{min(1 + dropped / batch, 4):.1f}",
            f"{waited}; of {sampled:.0f} groups that are sampled per step {dropped:.0f} are dropped, and their "
            "replacements are asked for one round later",
        )  # fmt: skip
    if run is not None and run.devices and run.rollout.engine == "transformers":
        return Advice("rollout.engine", "vllm", f"{waited}; the engine of transformers is slow on a GPU")
    if placed != "separate":
        devices = run.devices_per_node if run is not None else 1
        return Advice(
            "devices_per_node", str(max(2, 2 * devices)),
            f"{waited}; engines and training take turns on {devices} devices per node",
        )  # fmt: skip
    if pipeline is not None and not pipeline.staleness and rest >= 0.25 * whole:
        least = max(waits, rest)
        return Advice(
            "pipeline", "one-step-off",
            f"{waited}, and the engines wait while it trains for {_seconds(rest)}: in turn that is "
            f"{_seconds(whole)}, at the same time about {_seconds(least)}",
        )  # fmt: skip
    useful = busy * whole / max(waits, busy * whole, 1e-9) if engines > 1 else 1.0
    if pipeline is not None and pipeline.drains and useful < 0.6:
        return Advice(
            "pipeline", "async(staleness=2)",
            f"{waited}; meanwhile an engine is busy {useful:.0%} of the time, and then waits for the longest response "
            "of the others",
        )  # fmt: skip
    # With this many engines, sampling takes as long as the rest of the step.
    wanted = min(max(engines + 1, math.ceil(engines * waits / max(rest, 1e-9))), GROWTH * engines)
    return Advice(
        "rollout.engines", str(wanted),
        f"{waited}, and {engines} {'engine is' if engines == 1 else 'engines are'} busy {busy:.0%} of the time; with "
        f"{wanted} the wait is about {_seconds(waits * engines / wanted)}",
    )  # fmt: skip


def _scoring(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    whole, waits = sum(parts.values()), parts["scoring"]
    waited = f"the trainer waits {_seconds(waits)} of {_seconds(whole)} for rewards alone: all responses are sampled"
    if run is None:
        return Advice("reward_workers", "more", waited)
    named = [one for one in run.scored if getattr(one, "inline", False)]
    if named:
        return Advice(
            "Reward(inline)", "False",
            f"{waited}; {', '.join(one.name for one in named)} runs inside of the trainer, one response after the "
            "other; outside of it reward_workers score at the same time",
        )  # fmt: skip
    models = [one for one in run.reward_models if len(run.reward_models) == len(run.scored)]
    if models:
        members = models[0].members
        wanted = min(max(members + 1, math.ceil(members * waits / (0.1 * whole))), GROWTH * members)
        has = _count(members, "member", "members")
        return Advice("RewardModel(members)", str(wanted), f"{waited}; {models[0].name} has {has}")
    if all(getattr(one, "is_async", False) for one in run.scored):
        return Advice("the reward", "faster", f"{waited}; its async functions run all at once already")
    workers, names = run.reward_workers, ", ".join(repr(one.name) for one in run.scored)
    score = (
        f"{_count(workers, 'process computes', 'processes compute')} the reward{'s' * (len(run.scored) > 1)} {names}"
    )
    wanted = min(max(workers + 1, math.ceil(workers * waits / max(0.1 * (whole - waits), 1e-9))), GROWTH * workers)
    return Advice(
        "reward_workers", str(wanted),
        f"{waited}; {score}; "
        f"with {wanted} the wait is about {_seconds(waits * workers / wanted)}, if there are cores for them",
    )  # fmt: skip


def _training(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    whole, seconds = sum(parts.values()), parts["training"]
    passes, tokens = figures.mean("packs/passes"), figures.mean("packs/tokens")
    memory, waits = figures.mean("memory/actor", -1.0), figures.mean("packs/ranks_wait")
    took = f"training takes {_seconds(seconds)} of {_seconds(whole)}"
    room = memory < ROOM  # or unknown
    held = "" if memory < 0 else f"; {memory:.0%} of the memory is in use"
    if passes >= 4 and tokens < SMALL_PASS and room:
        budget = run.actor.token_budget if run is not None else round(tokens)
        wanted = min(max(2 * budget, SMALL_PASS), max(GROWTH * budget, SMALL_PASS), math.ceil(passes * tokens))
        wanted = max(wanted, 2 * budget)
        return Advice(
            "actor.token_budget", str(wanted),
            f"{took}: {passes:.0f} passes of {tokens:.0f} tokens per rank; fewer and larger ones share the fixed costs "
            f"of a pass{held}; rlmesh train CONFIG --fit prints the largest budget that fits",
        )  # fmt: skip
    if waits >= 0.25 and run is not None:
        return Advice(
            "actor.token_budget", str(max(1, run.actor.token_budget // 2)),
            f"{took}; {waits:.0%} of the ranks' time they wait for the rank with the largest packs: smaller packs are "
            "spread more evenly",
        )  # fmt: skip
    if run is not None and run.actor.activation_checkpointing and 0 <= memory < 0.5:
        return Advice(
            "actor.activation_checkpointing", "false",
            f"{took}, in which activations are computed twice{held}",
        )  # fmt: skip
    ranks = run.actor.ranks if run is not None else 1
    idle = 1 - figures.mean("buffer/engines_busy", 1.0)
    idling = f"; the engines are idle {idle:.0%} of the time" if idle >= 0.3 else ""
    return Advice("actor.ranks", str(2 * ranks), f"{took} on {ranks} rank{'s' * (ranks > 1)}{held}{idling}")


def _evaluating(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    took = (
        f"log-probabilities before the update take {_seconds(parts['evaluating'])} of {_seconds(sum(parts.values()))}"
    )
    if run is not None and "reference" in run.algorithm.needs:
        return Advice("algorithm.kl", "0", f"{took}; without the divergence no reference model is computed")
    if run is not None and getattr(run.algorithm, "correction", None) is not None and run.actor.minibatches == 1:
        return Advice("algorithm.correction", "null", f"{took}; without a correction the update gives them itself")
    training = _training(figures, parts, run)
    return Advice(training.setting, training.value, f"{took}; {training.why}")


def _pushing(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    took = f"each push takes {_seconds(parts['pushing'])} of {_seconds(sum(parts.values()))}"
    if run is not None and run.devices and run.actor.lora.rank == 0 and run.rollout.engine == "transformers":
        return Advice("actor.lora.rank", "16", f"{took}; with an adapter a push has a few percent of the bytes")
    batch = run.batch_size if run is not None else 0
    return Advice("batch_size", str(2 * batch) if batch else "larger", f"{took}; a larger step pushes less often")


def _saving(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    whole, pause = sum(parts.values()), parts["saving"]
    every = run.save_every if run is not None else 1
    wanted = min(every * GROWTH, max(every + 1, math.ceil(every * pause / (0.05 * (whole - pause) + 1e-9))))
    why = f"checkpoints take {_seconds(pause)} of {_seconds(whole)}, one every {every} steps"
    return Advice("save_every", str(wanted), f"{why}; with {wanted} about {_seconds(pause * every / wanted)}")


def _validating(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    whole, waits = sum(parts.values()), parts["validating"]
    waited = f"validations take {_seconds(waits)} of {_seconds(whole)}"
    if run is None:
        return Advice("validate_every", "larger", waited)
    if not run.evaluation.background and run.placed == "separate" and not run.schedule.staleness:
        return Advice("evaluation.background", "true", f"{waited}; the engines are idle while a step trains")
    every = run.validate_every or run.steps
    wanted = min(every * GROWTH, max(every + 1, math.ceil(every * waits / (0.1 * (whole - waits) + 1e-9))))
    return Advice("validate_every", str(wanted), f"{waited}, one every {every} steps")


def _other(figures: _Figures, parts: Parts, run: Run | None) -> Advice:
    took = f"{_seconds(parts['other'])} of {_seconds(sum(parts.values()))} are in none of the phases"
    batch = run.batch_size if run is not None else 0
    return Advice("batch_size", str(2 * batch) if batch else "larger", f"{took}: a larger step has them less often")


_ADVICE = {
    "sampling": _sampling, "scoring": _scoring, "evaluating": _evaluating, "training": _training, "pushing": _pushing,
    "saving": _saving, "validating": _validating, "other": _other,
}  # fmt: skip


def _notes(figures: _Figures, parts: Parts, run: Run | None, bottleneck: Part) -> Iterator[str]:
    mean = figures.mean
    if (memory := mean("memory/actor")) >= FULL:
        yield f"{memory:.0%} of the actor's memory is in use: a lower actor.token_budget keeps the run from failing"
    idle = 1 - mean("buffer/engines_busy", 1.0)
    if idle >= 0.5 and bottleneck != "sampling":
        yield f"the engines are idle {idle:.0%} of the time; fewer of them (rollout.engines) leave devices for training"
    if (waits := mean("packs/ranks_wait")) >= 0.25 and bottleneck != "training":
        yield f"the actor's ranks wait {waits:.0%} of the passes for the rank with the largest packs"
    if (cut := mean("cut_off_share")) >= 0.3:
        most = f" (rollout.max_tokens={run.rollout.max_tokens})" if run is not None else ""
        yield f"a limit cuts off {cut:.0%} of the responses{most}"
    batch = run.batch_size if run is not None else 0
    if (dropped := mean("buffer/dropped")) and dropped >= 0.25 * batch:
        yield f"{dropped:.1f} groups per step are sampled and dropped, since all their rewards are equal"
    for name, what in (
        ("failed", "groups per step fail without a reward"),
        ("asked_again", "groups per step are sampled again, since their engine died or had no weights"),
    ):
        if (count := mean(f"buffer/{name}")) > 0:
            yield f"{count:.2g} {what}"
    if (failed := mean("reward_failed")) >= 0.01:
        yield f"rewards fail on {failed:.0%} of the responses: rlmesh samples RUN --filter 'said~failed'"
    if run is not None and run.schedule.staleness and (stale := mean("buffer/staleness_mean")) > 0:
        gap = mean("off_policy_k3")
        yield f"samples are {stale:.1f} versions old on average; off_policy_k3 {gap:.2g} nats per token"
    if lost := figures.chosen[-1].metrics.get("steps_lost", 0.0):
        yield f"restarts have undone {lost:.0f} steps"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"

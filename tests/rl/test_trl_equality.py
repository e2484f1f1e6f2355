"""GRPO gives the losses and weights of TRL 1.16 on identical recorded samples, in float32, over 20 steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.trainers.batches import shares_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import post_training_rlmesh  # noqa: E402
import trl_equality as equality  # noqa: E402
from post_training_samples import record  # noqa: E402
from post_training_trl import Settings, weights_of  # noqa: E402

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl_grpo.json").read_text())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_numbers_of_every_case_are_recorded() -> None:
    assert RECORDED["trl"].startswith("1.16.")
    assert {*RECORDED["cases"]} == {*equality.CASES}


@pytest.mark.parametrize("name", equality.CASES)
def test_losses_norms_and_weights_are_those_recorded_of_trl(name: str) -> None:
    theirs = RECORDED["cases"][name]
    track = equality.rlmesh_track(equality.CASES[name])
    assert [seen.loss for seen, _ in track] == pytest.approx(theirs["losses"], rel=0, abs=equality.GOAL)
    assert [seen.grad_norm for seen, _ in track] == pytest.approx(theirs["grad_norms"], rel=1e-4)
    _, weights = track[-1]
    assert {*weights} == {*theirs["weights"]}
    for key, value in weights.items():
        *entries, squares = equality.summary(value)
        assert entries == pytest.approx(theirs["weights"][key][:-1], rel=0, abs=equality.GOAL), key
        assert squares == pytest.approx(theirs["weights"][key][-1], rel=1e-5), key


def test_the_training_that_is_compared_moves_the_weights_and_clips() -> None:
    """Equality of runs in which nothing happens proves nothing."""
    before = weights_of(equality.initial_model())
    track = equality.rlmesh_track(equality.CASES["grpo, two epochs"])
    moved = max(float((track[-1][1][name] - before[name]).abs().max()) for name in before)
    assert moved > 1000 * equality.GOAL
    # A second step on the same batch has ratios away from 1, so its loss differs from the first step's.
    first, second = track[-2][0].loss, track[-1][0].loss
    assert abs(first - second) > 100 * equality.GOAL


def test_without_the_settings_of_trl_the_weights_differ() -> None:
    """The check is sensitive: another clip bound, or one more token in the divisor, is seen."""
    case = equality.CASES["dapo, clip-higher, two epochs"]
    changed = Settings(**{**vars(case), "clip_high": 0.2})
    other = equality.differences(equality.rlmesh_track(changed), equality.rlmesh_track(case))
    assert max(weights for *_, weights in other) > 100 * equality.GOAL


class ReadingGRPO(GRPO):
    """As GRPO, with a forward pass before the step."""

    @property
    def reads_log_probs(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["grpo", "dapo, clip-higher, two epochs"])
def test_a_forward_pass_before_the_step_changes_nothing(name: str) -> None:
    """The first pass of the step gives the same log-probabilities, and all epochs have the same ratio."""
    settings = equality.CASES[name]
    track = equality.rlmesh_track(settings, 6)
    with mock.patch.object(post_training_rlmesh, "GRPO", ReadingGRPO):
        other = equality.rlmesh_track(settings, 6)
    found = equality.differences(track, other)
    assert max(loss for loss, *_ in found) < 1e-7
    assert max(weights for *_, weights in found) < 1e-6


def test_the_log_probs_of_an_update_are_those_before_it() -> None:
    settings = equality.CASES["dapo, clip-higher, two epochs"]
    model, shape = equality.initial_model(), equality.SHAPE
    run = post_training_rlmesh.LocalRun(model, shape.samples, shape.response_tokens, settings, token_budget=120)
    batch = record(shape, 1)[0]
    packs, _ = run.trainer.evaluate(post_training_rlmesh.groups_of(batch))
    (own,) = packs["actor"][0].by_rank
    before = run.actor.log_probs(own, 0)
    run.step(batch)
    taken = run.actor.first_log_probs()
    after = run.actor.log_probs(own, 1)
    for one, two, three in zip(before, taken, after, strict=True):
        assert one == pytest.approx(two, abs=1e-6)
        assert abs(one - three).max() > 1e-3


def run_in_minibatches() -> tuple[Any, list[Any]]:
    """Two batches in two optimizer steps and two epochs each; gives the run and the largest error of the old
    log-probabilities of each optimizer step, beside those that the actor gives when it is asked before the batch."""
    settings, shape = equality.CASES["dapo, clip-higher, two epochs"], equality.SHAPE
    run = post_training_rlmesh.LocalRun(
        equality.initial_model(), shape.samples, shape.response_tokens, settings, token_budget=120, minibatches=2
    )
    errors: list[float] = []
    engine: Any = run.actor.engine
    inner = engine.train_step
    for version, batch in enumerate(record(shape, 2)):
        parts, _ = run.trainer.evaluate(post_training_rlmesh.groups_of(batch))
        before = {
            (int(row), int(place)): float(log_prob)
            for part in parts["actor"]
            for one, rows in zip(part.by_rank[0], run.actor.log_probs(part.by_rank[0], version), strict=True)
            for row, place, log_prob in zip(one.rows, one.places, rows, strict=True)
        }

        def train_step(given: Any, loss: Any, before: dict[tuple[int, int], float] = before) -> Any:
            for one, columns in zip(given.packs, given.columns, strict=True):
                asked = [before[int(row), int(place)] for row, place in zip(one.rows, one.places, strict=True)]
                errors.append(float((columns.old_log_probs - torch.tensor(asked)).abs().max()))
            return inner(given, loss)

        engine.train_step = train_step
        run.step(batch)
    assert run.actor.version == 2 and engine.steps == 8
    return run, errors


def test_minibatches_measure_ratios_from_the_weights_before_the_first_of_them() -> None:
    """The first pass over the second minibatch comes after an optimizer step: its log-probabilities are not the old
    ones, whether the algorithm reads them or not."""
    run, errors = run_in_minibatches()
    assert not run.trainer.algorithm.reads_log_probs
    assert len(errors) >= 8 and max(errors) < 1e-6
    with mock.patch.object(post_training_rlmesh, "GRPO", ReadingGRPO):
        reading, _ = run_in_minibatches()
    assert reading.trainer.algorithm.reads_log_probs
    ours, theirs = (weights_of(one.actor.engine.plain) for one in (run, reading))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6


def test_minibatches_without_old_log_probabilities_are_refused() -> None:
    settings, shape = equality.CASES["grpo"], equality.SHAPE
    run = post_training_rlmesh.LocalRun(
        equality.initial_model(), shape.samples, shape.response_tokens, settings, token_budget=120, minibatches=2
    )
    packs, batch = run.trainer.evaluate(post_training_rlmesh.groups_of(record(shape, 1)[0]))
    weights = run.trainer.algorithm.weigh(batch)
    given = [shares_of(one, replace(batch, log_probs=None), weights, minibatches=2)[0] for one in packs["actor"]]
    with pytest.raises(ValueError, match="several optimizer steps in a pass need the old log-probabilities"):
        run.actor.update(given, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo, divergence 0.04", "dapo, clip-higher, two epochs"])
def test_losses_and_weights_are_those_of_trl(name: str) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0 accelerate")
    settings = equality.CASES[name]
    found = equality.differences(equality.rlmesh_track(settings), equality.trl_track(settings))
    assert max(loss for loss, *_ in found) <= equality.GOAL
    assert max(weights for *_, weights in found) <= equality.GOAL

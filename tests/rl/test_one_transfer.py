"""A training step waits for the device once, and ranks learn of each other's failed checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlmesh.rl.algorithms.protocol import Evaluated, TokenWeights
from rlmesh.rl.components import Columns
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch
from rlmesh.rl.masking import collected_checks, keep
from rlmesh.rl.packing import pack
from tests.rl.episodes import padded
from tests.rl.packed_ranks import ALGORITHM, DRAWN, build_engine, loss_of


class Reads(TorchDispatchMode):
    """Counts values that are read from tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, engine: Any) -> Iterator[Reads]:
    """Reads by item() and tolist(), but for the optimizer's own: its step counts are on the CPU."""
    reads = Reads()
    tolist, step = torch.Tensor.tolist, engine.optimizer.step

    def counting(tensor: torch.Tensor) -> Any:
        reads.count += 1
        return tolist(tensor)

    def uncounted() -> None:
        before = reads.count
        step()
        reads.count = before

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    monkeypatch.setattr(engine.optimizer, "step", uncounted)
    with reads:
        yield reads


def batch_of(bad: bool = False) -> tuple[PackedBatch, TokenWeights]:
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=24).by_rank[0]
    assert len(packs) > 3
    mask = padded([episode.mask for episode in DRAWN.episodes], fill=False)
    old = torch.full(mask.shape, -3.0, dtype=torch.float64)
    count = len(DRAWN.groups)
    whole = Evaluated(
        mask,
        torch.tensor(DRAWN.groups),
        torch.arange(count).double() % 4,
        torch.ones(count, dtype=torch.bool),
        old,
        old,
    )
    weights = ALGORITHM.weigh(whole)
    columns = [Columns.of(one, whole, weights, "cpu", torch.float32) for one in [*packs, EMPTY]]
    if bad:
        old_log_probs = columns[1].old_log_probs
        assert old_log_probs is not None
        old_log_probs[0] = float("nan")
    return PackedBatch(packs, columns[:-1], columns[-1]), weights


def test_a_step_of_several_packs_reads_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("ddp")
    batch, weights = batch_of()
    engine.train_step(batch, partial(loss_of, weights=weights))
    with counted(monkeypatch, engine) as reads:
        report = engine.train_step(batch, partial(loss_of, weights=weights))
    assert reads.count == 1 and report.grad_norm > 0 and report.statistics["tokens"] > 0
    engine.close()


def test_a_check_that_fails_changes_nothing_and_is_told() -> None:
    engine = build_engine("ddp")
    batch, weights = batch_of(bad=True)
    before = [parameter.detach().clone() for parameter in engine.plain.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(FloatingPointError, match="old_log_probs holds 1 values that are not finite"):
        engine.train_step(batch, partial(loss_of, weights=weights))
    assert engine.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.plain.parameters(), strict=True))  # type: ignore[attr-defined]
    good, weights = batch_of()
    assert engine.train_step(good, partial(loss_of, weights=weights)).step == 1
    engine.close()


def test_failures_are_numbers_of_the_device() -> None:
    x = torch.tensor([1.0, float("inf")])
    with collected_checks() as checks:
        keep(x, torch.tensor([True, False]))
        keep(x, torch.tensor([False, True]), name="second")
    failures = checks.failures(torch.device("cpu")).tolist()
    assert failures == [0.0, 1.0]
    checks.raise_first([0.0, 0.0])
    with pytest.raises(FloatingPointError, match="second holds 1 values"):
        checks.raise_first(failures)
    with pytest.raises(FloatingPointError, match="second"):
        checks.evaluate()
    with collected_checks() as none:
        pass
    assert none.failures(torch.device("cpu")).shape == (0,)

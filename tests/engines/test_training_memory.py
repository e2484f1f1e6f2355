"""Offload: memory is really given back, and comes back bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.offload import Offloaded, own_memory
from tests.engines import checkpoint_writer

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_an_engine_that_is_offloaded_into_a_file_takes_no_memory(tmp_path: Path) -> None:
    engine = checkpoint_writer.make(16 * MIB)
    checkpoint_writer.step(engine)
    weight = engine.plain.weight
    before, held = weight.detach().clone(), resident_bytes()
    engine.offload(tmp_path)
    assert (tmp_path / "rank-00000.offload").stat().st_size == 3 * 64 * MIB + 4, "weights, two moments, a step count"
    assert resident_bytes() < held - 150 * MIB
    with pytest.raises(UsageError, match="rank 0 cannot train: its weights are offloaded; call reload"):
        checkpoint_writer.step(engine)
    with pytest.raises(UsageError, match="cannot save"):
        engine.save(tmp_path)
    engine.reload()
    assert engine.plain.weight is weight and torch.equal(weight, before)
    assert list(tmp_path.iterdir()) == []
    checkpoint_writer.step(engine)
    assert engine.steps == 2 and not torch.equal(weight, before)
    engine.offload(tmp_path)
    engine.close()
    assert list(tmp_path.iterdir()) == [], "who ends while it is offloaded leaves no file"


def test_views_ties_and_versions_survive() -> None:
    flat = torch.arange(12.0)
    view, twice = flat[3:9].view(2, 3), flat[3:9].view(2, 3)
    version = flat._version
    moved = Offloaded([view, flat, twice, torch.empty(0)], None)
    assert moved.nbytes == 48 and flat.untyped_storage().nbytes() == 0
    moved.restore()
    assert view.tolist() == [[3, 4, 5], [6, 7, 8]] and flat._version == version
    view.add_(1)
    assert flat[3] == 4 and twice[0, 0] == 4, "they still share memory"


def test_memory_that_numpy_has_seen_stays(caplog: pytest.LogCaptureFixture) -> None:
    seen, other = torch.ones(4), torch.ones(4)
    array = seen.numpy()
    moved = Offloaded([seen, other], None)
    assert "16 bytes stay where they are" in caplog.text
    assert array.sum() == 4 and seen.sum() == 4 and other.untyped_storage().nbytes() == 0
    moved.restore()
    assert other.sum() == 4


def test_memory_of_others_is_copied_first() -> None:
    tensor = torch.nn.Parameter(torch.from_numpy(np.ones(4, np.float32)))
    own_memory([tensor])
    assert tensor.untyped_storage().resizable()


def test_a_full_disk_leaves_the_memory(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        Offloaded([tensor], tmp_path / "file")
    assert tensor.sum() == 4


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    moved = Offloaded([torch.ones(4)], tmp_path / "file")
    os.truncate(tmp_path / "file", 8)
    with pytest.raises(OSError, match="is shorter than what was written to it"):
        moved.restore()

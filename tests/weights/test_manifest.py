"""Manifests: what fits, and what is said of what does not."""

from __future__ import annotations

import pickle

import pytest

from rlmesh.errors import WeightSyncError
from rlmesh.weights.manifest import Casts, Manifest, TensorSpec, misfits

W = TensorSpec("embed", (8, 4), "float32")
H = TensorSpec("head", (8, 4), "float32")
TIED = TensorSpec("head", (8, 4), "float32", alias_of="embed")


def manifest(*specs: TensorSpec, excluded: tuple[str, ...] = ()) -> Manifest:
    return Manifest(specs, excluded)


def test_equal_ones_fit_and_survive_the_wire() -> None:
    one = manifest(W, TIED, excluded=("inv_freq",))
    assert misfits(one, one, Casts()) == []
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.nbytes == 8 * 4 * 4
    assert one.digest() != manifest(W, H).digest()


@pytest.mark.case("O18")
def test_missing_and_additional_names_are_named_with_the_nearest() -> None:
    bias = TensorSpec("bias", (8,), "float32")
    (more,) = misfits(manifest(W), manifest(W, TensorSpec("embedd", (8, 4), "float32")), Casts())
    assert more == "the source has no embedd, which the sink needs; the nearest name there is 'embed'"
    (less,) = misfits(manifest(W, bias), manifest(W, excluded=("bias",)), Casts())
    assert less == "the sink has no bias, which the source has; the sink excludes bias"


def test_shapes_and_types_are_named() -> None:
    assert misfits(manifest(W), manifest(TensorSpec("embed", (4, 8), "float32")), Casts()) == [
        "embed: the source has shape [8, 4], the sink [4, 8]"
    ]
    half = manifest(TensorSpec("embed", (8, 4), "bfloat16"))
    (fault,) = misfits(manifest(W), half, Casts())
    assert fault == (
        "embed: the source has float32, the sink bfloat16; allow it with allow_cast={'float32': 'bfloat16'}"
    )
    for allow in (True, {"float32": "bfloat16"}, [("float32", "bfloat16")]):
        assert misfits(manifest(W), half, Casts.of(allow)) == []
    integers = manifest(TensorSpec("embed", (8, 4), "int64"))
    assert misfits(manifest(W), integers, Casts.of(True)) == ["embed: the source has float32, the sink int64"]


def test_ties_of_the_sink_must_be_ties_of_the_source() -> None:
    (fault,) = misfits(manifest(W, H), manifest(W, TIED), Casts())
    assert "head: tied to embed at the sink, but the source has two tensors" in fault
    assert misfits(manifest(W, TIED), manifest(W, H), Casts()) == []


def test_impossible_manifests_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="names appear twice: embed"):
        manifest(W, W)
    with pytest.raises(WeightSyncError, match="owns no memory"):
        manifest(TIED)
    with pytest.raises(WeightSyncError, match="cannot be synced"):
        manifest(TensorSpec("x", (1,), "complex256"))

"""Batches as columns."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.envs import MultiAgentBatch, SampleBatch
from rlmesh.errors import UsageError


def batch_of(lengths: list[int]) -> SampleBatch:
    """Episodes of these lengths; ``obs`` numbers the rows."""
    rows = sum(lengths)
    ends = np.cumsum(lengths) - 1
    terminateds = np.zeros(rows, bool)
    terminateds[ends] = True
    return SampleBatch(
        obs=np.arange(rows, dtype=np.float32)[:, None],
        eps_id=np.repeat(np.arange(len(lengths)), lengths),
        t=np.concatenate([np.arange(length) for length in lengths]) if rows else np.zeros(0, int),
        terminateds=terminateds,
        truncateds=np.zeros(rows, bool),
    )


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=8)


@given(LENGTHS)
def test_episodes_are_split_and_joined(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    episodes = batch.split_by_episode()
    assert [len(episode) for episode in episodes] == lengths
    assert [len(episode) for episode in batch.split_by_episode("dones")] == lengths
    assert SampleBatch.concat_samples(episodes) == batch


@given(LENGTHS, st.integers(1, 5))
def test_time_major_keeps_each_row_once(lengths: list[int], longest: int) -> None:
    batch = batch_of(lengths)
    padded, sizes = batch.time_major(longest)
    assert padded["obs"].shape == (sizes.max(), len(sizes), 1)
    rows = np.concatenate([padded["obs"][:size, i] for i, size in enumerate(sizes)])
    assert np.array_equal(rows, batch["obs"])
    assert all(not padded["obs"][size:, i].any() for i, size in enumerate(sizes))


@given(LENGTHS, st.integers(1, 9), st.integers(1, 3))
def test_minibatches_cover_each_epoch(lengths: list[int], size: int, epochs: int) -> None:
    batch = batch_of(lengths)
    parts = list(batch.minibatches(size, epochs=epochs, rng=np.random.default_rng(0)))
    seen = np.concatenate([part["obs"][:, 0] for part in parts])
    assert np.array_equal(np.sort(seen), np.sort(np.tile(batch["obs"][:, 0], epochs)))
    assert all(np.array_equal(part["t"], batch["t"][part["obs"][:, 0].astype(int)]) for part in parts)  # aligned


def test_slices_are_views_and_copies_are_not() -> None:
    batch = batch_of([3, 4])
    batch[2:5]["obs"][:] = -1
    assert (batch["obs"][2:5] == -1).all()
    copy = batch.copy()
    copy["obs"][:] = 7
    assert not (batch["obs"] == 7).any()
    assert len(batch[[0, 6]]) == 2


def test_dones_are_a_view_of_both_ends() -> None:
    batch = batch_of([2, 2])
    batch["truncateds"][0] = True
    assert batch["dones"].tolist() == [True, True, False, True]
    assert "dones" in batch
    assert "dones" not in list(batch)
    with pytest.raises(UsageError, match="computed from terminateds and truncateds"):
        batch["dones"] = np.zeros(4, bool)


def test_wrong_columns_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'rewards' has 2 rows, the others .* have 3"):
        SampleBatch(obs=np.zeros(3), rewards=np.zeros(2))
    with pytest.raises(UsageError, match="not a single value"):
        SampleBatch(obs=np.zeros(()))
    with pytest.raises(UsageError, match="'t' is not in all batches"):
        SampleBatch.concat_samples([SampleBatch(obs=np.zeros(1)), SampleBatch(obs=np.zeros(1), t=np.zeros(1))])
    with pytest.raises(UsageError, match="no batch to join"):
        SampleBatch.concat_samples([])
    with pytest.raises(KeyError, match="no column 'ob'; it has obs"):
        SampleBatch(obs=np.zeros(1))["ob"]


def test_composed_observations_are_trees() -> None:
    one = SampleBatch(obs={"image": np.zeros((2, 4)), "pose": (np.ones(2), np.ones((2, 3)))}, t=np.arange(2))
    both = SampleBatch.concat_samples([one, one])
    assert both["obs"]["pose"][1].shape == (4, 3)
    assert len(both[1:3]["obs"]["image"]) == 2
    assert pickle.loads(pickle.dumps(both)) == both


def test_the_printed_form_is_that_of_the_document() -> None:
    infos = np.empty(2, object)
    infos[:] = [{}, {}]
    batch = SampleBatch(
        obs=np.array([[0.016, -1], [2, 3]], np.float32), actions=np.array([0, 1]), infos=infos,
        terminateds=np.array([False, True]), truncateds=np.array([False, False]),
    )  # fmt: skip
    lines = repr(batch).splitlines()
    assert lines[0] == "{ 'actions': np.ndarray((2,), dtype=int64, min=0.0, max=1.0, mean=0.5),"
    assert lines[1] == "    'dones': np.ndarray((2,), dtype=bool, min=0.0, max=1.0, mean=0.5),"
    assert lines[2] == "    'infos': np.ndarray((2,), dtype=object, head={}),"
    assert lines[3] == "    'obs': np.ndarray((2, 2), dtype=float32, min=-1.0, max=3.0, mean=1.004),"
    assert lines[-1] == "}"


def test_batches_of_several_policies() -> None:
    one, two = batch_of([2]), batch_of([3])
    both = MultiAgentBatch({"a": one, "b": two}, 3)
    joined = SampleBatch.concat_samples([both, MultiAgentBatch({"a": two}, 2)])
    assert (joined.env_steps(), joined.agent_steps(), len(joined["a"])) == (5, 8, 5)
    assert MultiAgentBatch.wrap_as_needed({"default_policy": one}, 2) is one
    with pytest.raises(KeyError, match="no policy 'c'"):
        joined["c"]

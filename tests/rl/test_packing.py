from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rlmesh.rl import prefix
from rlmesh.rl.balance import fill, spread_evenly
from rlmesh.rl.packing import Pack, Tokens, pack
from rlmesh.rl.prefix import PrefixLayout, kernel_dtype, packed_attention
from rlmesh.rl.types import Episode, Turn
from tests.rl.episodes import Episodes, episodes_of, groups_of_episodes

sizes_drawn = st.lists(st.integers(0, 40), max_size=20)


@given(sizes_drawn, st.integers(1, 5))
def test_every_item_is_in_one_bin_and_no_bin_is_far_above_the_mean(sizes: list[int], bins: int) -> None:
    found = spread_evenly(sizes, bins)
    assert len(found) == bins and sorted(i for items in found for i in items) == list(range(len(sizes)))
    costliest = max(sum(sizes[i] for i in items) for items in found)
    assert costliest <= max(sum(sizes) / bins + max(sizes, default=0), 0)


@given(sizes_drawn, st.integers(1, 50), st.integers(1, 3))
def test_no_bin_is_beyond_its_capacity(sizes: list[int], capacity: int, ranks: int) -> None:
    found = fill(sizes, capacity, multiple_of=ranks)
    assert len(found) % ranks == 0 and len(found) >= ranks
    assert sorted(i for items in found for i in items) == list(range(len(sizes)))
    for items in found:
        assert len(items) <= 1 or sum(sizes[i] for i in items) <= capacity


def test_as_few_bins_as_the_sum_allows() -> None:
    assert len(fill([5, 5, 5, 5], 10)) == 2
    assert len(fill([6, 6, 6], 10)) == 3
    assert fill([], 10, multiple_of=2) == [[], []]
    with pytest.raises(ValueError, match="capacity"):
        fill([1], 0)
    with pytest.raises(ValueError, match="bins"):
        spread_evenly([1], 0)


@given(groups_of_episodes(), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_each_token_of_the_policy_is_one_target(drawn: Episodes, budget: int, ranks: int, share: bool) -> None:
    packs = pack(drawn.episodes, token_budget=budget, ranks=ranks, groups=drawn.groups, share_prompts=share)
    assert len(packs.by_rank) == ranks and len({len(rank) for rank in packs.by_rank}) == 1
    seen = set()
    values = drawn.normal()
    for one in (one for rank in packs.by_rank for one in rank):
        assert sum(segment.length for segment in one.segments) == len(one) == len(one.positions)
        for source, target, row, place, taken in zip(
            one.sources, one.targets, one.rows, one.places, one.take(values), strict=True
        ):
            ids = drawn.episodes[row].ids
            assert drawn.episodes[row].mask[place] and ids[place] == target
            assert one.ids[source] == ids[place - 1] and one.positions[source] == place - 1
            assert taken == values[row][place]
            seen.add((int(row), int(place)))
    assert len(seen) == sum(episode.response_tokens for episode in drawn.episodes)
    assert packs.episode_tokens == sum(map(len, drawn.episodes)) and 0 <= packs.saved_share < 1
    if not share:
        assert packs.tokens == packs.episode_tokens


def test_a_prompt_is_computed_once_per_pack() -> None:
    drawn = episodes_of([(100, [10, 10, 10, 10])], 0)
    assert pack(drawn.episodes, token_budget=1000, groups=drawn.groups).tokens == 140
    parts = pack(drawn.episodes, token_budget=120, groups=drawn.groups)
    assert [len(one) for one in parts.by_rank[0]] == [120, 120]
    assert pack(drawn.episodes, token_budget=1000, groups=drawn.groups, share_prompts=False).tokens == 440


def test_ranks_get_about_equally_many_tokens() -> None:
    drawn = episodes_of([(3, [n]) for n in (1, 3, 4, 6, 7, 9, 10, 12) * 4], 1)
    packs = pack(drawn.episodes, token_budget=40, ranks=3)
    totals = [sum(map(len, rank)) for rank in packs.by_rank]
    assert max(totals) <= 1.15 * min(totals)


def test_an_episode_beyond_the_budget_goes_alone() -> None:
    drawn = episodes_of([(4, [30]), (4, [1]), (4, [1])], 2)
    packs = pack(drawn.episodes, token_budget=12)
    assert sorted(len(one) for one in packs.by_rank[0]) == [10, 34]


def test_wrong_arguments_are_refused() -> None:
    drawn = episodes_of([(2, [1]), (2, [1])], 3)
    with pytest.raises(ValueError, match="token_budget and ranks"):
        pack(drawn.episodes, token_budget=0)
    with pytest.raises(ValueError, match="as many groups"):
        pack(drawn.episodes, token_budget=10, groups=[0])
    with pytest.raises(ValueError, match="episodes 0 and 1 are of group 5 but have different prompts"):
        pack(drawn.episodes, token_budget=10, groups=[5, 5])
    assert [len(one) for one in pack([], token_budget=10, ranks=1).by_rank[0]] == [0]


@pytest.mark.parametrize("long", [1024, 4])
@given(drawn=groups_of_episodes())
def test_packed_attention_is_that_of_each_segment(long: int, drawn: Episodes) -> None:
    one = pack(drawn.episodes, token_budget=10_000, groups=drawn.groups).by_rank[0][0]
    generator = torch.Generator().manual_seed(drawn.seed)
    query, key, value = (
        torch.randn(heads, len(one), 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "LONG", long)
        got = packed_attention(query, key, value, PrefixLayout.of(one.segments, "cpu"))
    assert got.shape == (len(one), 4, 8)
    torch.testing.assert_close(got, reference_attention(query, key, value, one), atol=1e-12, rtol=0)


def reference_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, one: Pack) -> torch.Tensor:
    results = []
    for segment in one.segments:
        own = torch.arange(segment.start, segment.start + segment.length)
        seen = torch.cat([torch.arange(segment.prefix_start, segment.prefix_start + segment.prefix_length), own])
        mask = torch.ones(len(own), len(seen), dtype=torch.bool).tril(segment.prefix_length)
        part = scaled_dot_product_attention(
            query[None, :, own], key[None, :, seen], value[None, :, seen], mask, enable_gqa=True
        )
        results.append(part[0].transpose(0, 1))
    return torch.cat(results)


@given(drawn=groups_of_episodes())
def test_a_layout_for_the_kernel_serves_full_precision_too(drawn: Episodes) -> None:
    one = pack(drawn.episodes, token_budget=10_000, groups=drawn.groups).by_rank[0][0]
    x = torch.randn(2, len(one), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(drawn.seed))
    layout = PrefixLayout.of(one.segments, "meta")  # as on any device but the CPU
    for _ in range(2):
        got = packed_attention(x, x, x, layout)
        torch.testing.assert_close(got, reference_attention(x, x, x, one), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_computes_in_half_precision_only(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 8, dtype=dtype)
    assert kernel_dtype(x) is None
    assert kernel_dtype(x.half()) == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel_dtype(x) == torch.bfloat16, "rotary embeddings make float32 of what autocast computed"


def test_the_layout_of_another_pack_is_refused() -> None:
    one = pack(episodes_of([(2, [1])], 4).episodes, token_budget=10).by_rank[0][0]
    with pytest.raises(ValueError, match="the layout is of 3 tokens, the query of 5"):
        x = torch.zeros(1, 5, 8)
        packed_attention(x, x, x, PrefixLayout.of(one.segments, "cpu"))


def test_no_mask_is_larger_than_a_block_of_queries() -> None:
    drawn = episodes_of([(1500, [1500, 1500])], 5)
    one = pack(drawn.episodes, token_budget=100_000, groups=drawn.groups).by_rank[0][0]
    layout = PrefixLayout.of(one.segments, "cpu")
    assert not layout.batches and len(layout.alone) == 3
    short = PrefixLayout.of(
        pack(episodes_of([(20, [30] * 8)], 6).episodes, token_budget=10_000).by_rank[0][0].segments, "cpu"
    )
    assert len(short.batches) == 1 and not short.alone
    assert np.prod(short.batches[0].mask.shape) <= 8 * 90 * 90


@given(groups_of_episodes())
def test_tokens_of_a_batch_are_those_of_each_episode(drawn: Episodes) -> None:
    tokens = Tokens.of(drawn.episodes)
    mask, log_probs = tokens.mask, tokens.sampled_log_probs
    for row, episode in enumerate(drawn.episodes):
        size = len(episode)
        assert tokens.lengths[row] == size and tokens.prompts[row] == len(episode.prompt_ids)
        start = tokens.starts[row]
        assert np.array_equal(tokens.ids[start : start + size], episode.ids)
        assert np.array_equal(mask[row, :size], episode.mask) and not mask[row, size:].any()
        assert np.array_equal(log_probs[row, :size], episode.sampled_log_probs) and not log_probs[row, size:].any()


def test_tokens_of_truncated_sampling_have_the_mass_that_was_kept() -> None:
    log_probs, mass = np.array([-1, -2], np.float32), np.array([-0.5, 0.0], np.float32)
    truncated = Turn(np.array([4, 5], np.int32), "policy", log_probs, mass, ((0, 0, 2),))
    whole = Turn(np.array([6], np.int32), "policy", np.array([-3], np.float32), None, ((0, 0, 1),))
    episodes = [Episode((Turn.said([1, 2]), truncated, Turn.said([3]), whole)), Episode((Turn.said([1]), whole))]
    found = Tokens.of(episodes).sampled_log_probs
    assert found.tolist() == [[0, 0, -1.5, -2, 0, -3], [0, -3, 0, 0, 0, 0]]
    assert [episode.sampled_log_probs.tolist() for episode in episodes] == [found[0].tolist(), found[1, :2].tolist()]


def test_no_episodes_have_no_tokens() -> None:
    assert Tokens.of([]).mask.shape == (0, 0)

"""A transformers model gives the same on packs, on rows alone and on padded batches; values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import packed
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.engines.training.pack_check import Probe, rescaled_beyond
from rlmesh.rl.engines.training.packed import (
    CHECKED,
    PackedInputs,
    packed_hidden,
    packed_log_probs,
    packed_values,
    prepare,
)
from rlmesh.rl.packing import pack
from tests.rl.episodes import VOCABULARY, Episodes, episodes_of

DRAWN = episodes_of([(3, [4, 0, 7, 2]), (9, [5, 11, 3]), (5, [1]), (1, [6, 6])], 11)
CUTS = [
    pytest.param({"token_budget": 1000}, id="one pack"),
    pytest.param({"token_budget": 30}, id="several packs"),
    pytest.param({"token_budget": 30, "share_prompts": False}, id="prompts repeated"),
]


class ExactNorm(nn.Module):
    """RMS norm in the dtype of its input: that of transformers rounds to float32 inside."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def exact(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm: Any = child
                setattr(parent, name, ExactNorm(norm.weight, norm.variance_epsilon))
    return model.double()


def make(kind: str, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if kind == "qwen2":
        return exact(Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, **options)))
    return exact(LlamaForCausalLM(LlamaConfig(**sizes, **options)))


@pytest.fixture(params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield make(request.param)


def weights_of(drawn: Episodes) -> list[np.ndarray]:
    return drawn.normal()


def row_by_row(model: Any, drawn: Episodes) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities of each episode's tokens (but the first) by a plain forward, and the gradients of their sum."""
    model.zero_grad()
    found = []
    for episode, weights in zip(drawn.episodes, weights_of(drawn), strict=True):
        ids = torch.from_numpy(episode.ids).long().unsqueeze(0)
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)
        (chosen * torch.from_numpy(weights[1:] * episode.mask[1:])).sum().backward()
        found.append(chosen.detach())
    return found, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("cut", CUTS)
def test_packs_give_values_and_gradients_of_the_rows_alone(model: Any, cut: dict[str, Any]) -> None:
    expected, gradients = row_by_row(model, DRAWN)
    prepare(model)
    model.zero_grad()
    targets = 0
    for one in pack(DRAWN.episodes, groups=DRAWN.groups, **cut).by_rank[0]:
        terms = packed_log_probs(model, PackedInputs(one, "cpu"), chunk_tokens=7)
        alone = torch.stack([expected[row][place - 1] for row, place in zip(one.rows, one.places, strict=True)])
        torch.testing.assert_close(terms.log_probs.detach(), alone, atol=1e-9, rtol=0)
        (terms.log_probs * torch.from_numpy(one.take(weights_of(DRAWN)))).sum().backward()
        targets += len(one.targets)
    assert targets == sum(episode.response_tokens for episode in DRAWN.episodes)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=0)


def test_a_prepared_model_still_computes_padded_batches(model: Any) -> None:
    expected, _ = row_by_row(model, DRAWN)
    prepare(model)
    prepare(model)
    single = [i for i, episode in enumerate(DRAWN.episodes) if len(episode.turns) == 2 and episode.response_tokens]
    widest = max(DRAWN.episodes[i].response_tokens for i in single)
    longest = max(len(DRAWN.episodes[i].prompt_ids) for i in single)
    sequences = torch.zeros(len(single), longest + widest, dtype=torch.long)
    attention = torch.zeros_like(sequences, dtype=torch.bool)
    for row, i in enumerate(single):
        episode, start = DRAWN.episodes[i], longest - len(DRAWN.episodes[i].prompt_ids)
        sequences[row, start : start + len(episode)] = torch.from_numpy(episode.ids)
        attention[row, start : start + len(episode)] = True
    got = response_log_probs(model, sequences, attention, attention[:, longest:])
    for row, i in enumerate(single):
        episode = DRAWN.episodes[i]
        alone = expected[i][len(episode.prompt_ids) - 1 :]
        torch.testing.assert_close(got[row, : len(alone)].detach(), alone, atol=1e-9, rtol=0)


def test_checkpointed_activations_change_nothing(model: Any) -> None:
    prepare(model)
    one = pack(DRAWN.episodes, token_budget=1000, groups=DRAWN.groups).by_rank[0][0]
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model)
        model.train().zero_grad()
        packed_log_probs(model, PackedInputs(one, "cpu")).log_probs.sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found, atol=1e-12, rtol=0)


def test_values_are_those_before_each_token(model: Any) -> None:
    prepare(model)
    head = nn.Linear(32, 1).double()
    one = pack(DRAWN.episodes, token_budget=1000, groups=DRAWN.groups).by_rank[0][0]
    got = packed_values(model.base_model, head, PackedInputs(one, "cpu"))
    for value, row, place in zip(got, one.rows, one.places, strict=True):
        ids = torch.from_numpy(DRAWN.episodes[row].ids).long().unsqueeze(0)
        alone = head(model.base_model(input_ids=ids).last_hidden_state)[0, place - 1, 0]
        assert value.item() == pytest.approx(alone.item(), abs=1e-9)


@pytest.mark.parametrize("change", ["never prepared", "sdpa", "eager"])
def test_a_model_without_the_attention_of_packs_is_refused(model: Any, change: str) -> None:
    """Its own attention ignores the layout of the pack, and gives numbers that are wrong."""
    if change != "never prepared":
        prepare(model)
        model.set_attn_implementation(change)
    inputs = PackedInputs(pack(DRAWN.episodes, token_budget=1000).by_rank[0][0], "cpu")
    with pytest.raises(UsageError, match=r"cannot compute packs with the attention '\w+': call .*prepare"):
        packed_log_probs(model, inputs)
    with pytest.raises(UsageError, match="cannot compute packs with the attention"):
        packed_values(model.base_model, nn.Linear(32, 1).double(), inputs)


def test_an_empty_pack_takes_part_with_gradients_of_zero(model: Any) -> None:
    prepare(model)
    empty = pack([], token_budget=10).by_rank[0][0]
    terms = packed_log_probs(model, PackedInputs(empty, "cpu"))
    (terms.log_probs.sum() + terms.entropy.sum()).backward()
    assert terms.log_probs.shape == (0,)
    assert len(empty) == 0 and packed_hidden(model.base_model, PackedInputs(empty, "cpu")).shape == (1, 32)
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_models_that_cannot_compute_packs_are_refused() -> None:
    with pytest.raises(UsageError, match="Linear cannot compute packs"):
        prepare(nn.Linear(2, 2))
    windowed = make("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(UsageError, match="sliding window"):
        prepare(windowed)


def test_dropout_in_the_attention_is_refused() -> None:
    model = make("llama", attention_dropout=0.1).train()
    prepare(model)
    one = pack(DRAWN.episodes, token_budget=1000).by_rank[0][0]
    with pytest.raises(UsageError, match="without dropout"):
        packed_log_probs(model, PackedInputs(one, "cpu"))


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def of_kind(kind: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.for_model(kind, **(SIZES | options))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("kind", "options", "fault"),
    [
        ("granite", {"logits_scaling": 8.0}, "not the output of its head"),
        ("stablelm", {}, "other results on a pack"),
        ("rwkv", {"attention_hidden_size": 32}, "other results on a pack"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "fail on a pack"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "head_dim": 8, "num_local_experts": 4}, "other results"),
    ],
)
def test_models_whose_packs_differ_from_rows_alone_are_refused(kind: str, options: dict[str, Any], fault: str) -> None:
    model = of_kind(kind, **options)
    before = model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(UsageError, match=fault):
            prepare(model)
    assert model.config._attn_implementation == before
    assert model(input_ids=torch.tensor([[3, 4]])).logits.shape == (1, 2, VOCABULARY)  # padded batches still work


def test_a_model_whose_own_attention_computes_half_precision_only_is_compared_with_eager_attention() -> None:
    """As flash attention: the weights of a training are float32, and packs replace the attention anyway."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def half_only(*_: Any, **__: Any) -> Any:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    ALL_ATTENTION_FUNCTIONS.register("half_only", half_only)
    ALL_MASK_ATTENTION_FUNCTIONS.register("half_only", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for kind, options, fault in (
        ("llama", {}, None),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "head_dim": 8, "num_local_experts": 4}, "other results"),
    ):
        model = of_kind(kind, **options)
        model.set_attn_implementation("half_only")
        if fault is None:
            prepare(model)
            assert getattr(model, CHECKED)
            continue
        with pytest.raises(UsageError, match=fault):
            prepare(model)
        assert model.config._attn_implementation == "half_only"


def test_a_full_device_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed, "packed_hidden", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepare(of_kind("llama"))


def test_a_full_device_is_no_reason_to_try_another_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.OutOfMemoryError` is a RuntimeError, as that of an attention which does not compute float32."""
    model = of_kind("llama")
    before, tried = model.config._attn_implementation, []

    def full(causal: Any) -> Any:
        tried.append(causal.config._attn_implementation)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Probe, "of", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepare(model)
    assert tried == [before] and model.config._attn_implementation == before and not getattr(model, CHECKED, False)
    monkeypatch.undo()
    prepare(model)  # as soon as there is room again
    assert getattr(model, CHECKED)


def test_the_check_of_packs_leaves_mode_and_generators_as_they_were() -> None:
    model = make("llama").train()
    model.model.layers[0].eval()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    prepare(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_episodes_beyond_a_sliding_window_are_refused() -> None:
    model = of_kind("mistral", sliding_window=12, head_dim=8)
    prepare(model)
    short, long = (episodes_of([(prompt, [9])], 3) for prompt in (3, 4))
    packed_log_probs(model, PackedInputs(pack(short.episodes, token_budget=100).by_rank[0][0], "cpu"))
    with pytest.raises(UsageError, match=r"13 tokens.*window of 12"):
        packed_log_probs(model, PackedInputs(pack(long.episodes, token_budget=100).by_rank[0][0], "cpu"))


def test_episodes_for_which_positions_are_rescaled_are_refused() -> None:
    """A long episode would change the numbers of the short ones beside it."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    model = of_kind("llama", rope_parameters=rope, head_dim=8)
    prepare(model)
    assert rescaled_beyond(model.config) == 12
    short, long = (episodes_of([(prompt, [9])], 3) for prompt in (3, 4))
    packed_log_probs(model, PackedInputs(pack(short.episodes, token_budget=100).by_rank[0][0], "cpu"))
    with pytest.raises(UsageError, match=r"13 tokens, and beyond 12 the model rescales"):
        packed_log_probs(model, PackedInputs(pack(long.episodes, token_budget=100).by_rank[0][0], "cpu"))
    dynamic = of_kind("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert rescaled_beyond(dynamic.config) == 64 and rescaled_beyond(of_kind("llama").config) is None

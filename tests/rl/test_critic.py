"""A critic on packs: its values, its loss and its gradients are those of padded batches and of a NumPy twin."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlmesh.errors import UsageError
from rlmesh.rl import reference
from rlmesh.rl.algorithms import PPO, Evaluated
from rlmesh.rl.components import Columns, value_share
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.forward import response_values
from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch, PackedInputs, prepare
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.packing import pack
from rlmesh.rl.roles.defaults import causal_model
from rlmesh.rl.roles.value_head import ValueHead, ValueModel, value_model
from rlmesh.rl.trainers.batches import matrix_of, shares_of, value_metrics
from tests.rl.episodes import episodes_of, padded
from tests.rl.test_packed_forward import make

# One turn of the policy each (lengths that are 2 modulo 3 make two), so that the padded twin needs no gaps.
DRAWN = episodes_of([(3, [4, 1, 7, 3]), (9, [6, 10, 3]), (5, [1]), (1, [6, 6])], 11)
CUTS = [
    pytest.param({"token_budget": 1000}, id="one pack"),
    pytest.param({"token_budget": 30}, id="several packs"),
    pytest.param({"token_budget": 30, "share_prompts": False}, id="prompts repeated"),
]


def critic() -> ValueModel:
    model = ValueModel(make("qwen2").base_model).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        head: Any = model.head
        head.weight.copy_(torch.randn(1, 32, generator=generator, dtype=torch.float64))
        head.bias.fill_(0.3)
    return model


def evaluated(values: torch.Tensor | None = None) -> Evaluated:
    random = np.random.default_rng(3)
    mask = padded([episode.mask for episode in DRAWN.episodes], fill=False)
    count = len(DRAWN.episodes)
    old = torch.from_numpy(random.normal(size=mask.shape))
    return Evaluated(
        mask=mask,
        groups=torch.tensor(DRAWN.groups),
        rewards=torch.from_numpy(random.normal(size=count)),
        valid=torch.arange(count) != 2,
        log_probs=old,
        sampled_log_probs=old,
        values=torch.from_numpy(random.normal(size=mask.shape)) if values is None else values,
    )


def by_rows(model: ValueModel) -> torch.Tensor:
    """Values ``[episodes, time]`` by the padded forward pass, with gradient."""
    width = max(episode.response_tokens for episode in DRAWN.episodes)
    longest = max(len(episode.prompt_ids) for episode in DRAWN.episodes)
    count = len(DRAWN.episodes)
    sequences = torch.zeros(count, longest + width, dtype=torch.long)
    attention = torch.zeros_like(sequences, dtype=torch.bool)
    for row, episode in enumerate(DRAWN.episodes):
        start = longest - len(episode.prompt_ids)
        sequences[row, start : start + len(episode)] = torch.from_numpy(episode.ids)
        attention[row, start : start + len(episode)] = True
    values = response_values(model, sequences, attention, attention[:, longest:])
    found = []
    for row, episode in enumerate(DRAWN.episodes):
        before, own = len(episode.prompt_ids), episode.response_tokens
        # response_values gives float32, so the twin calls the model itself.
        ids = torch.from_numpy(episode.ids).long().unsqueeze(0)
        exact = model(ids, None, None)[0, before - 1 : before - 1 + own, 0]
        torch.testing.assert_close(values[row, :own].double(), exact, atol=1e-5, rtol=1e-5)
        found.append(torch.nn.functional.pad(exact, (before, 0)))
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_on_packs_are_those_of_rows_and_of_numpy(cut: dict[str, Any], clip: float | None) -> None:
    algorithm = PPO(value_clip=clip)
    batch = evaluated()
    weights = algorithm.weigh(batch)
    assert weights.returns is not None
    assert batch.values is not None
    model = critic()
    values = by_rows(model)
    counted = batch.usable
    wanted = reference.value_clip_loss(
        values.detach().numpy(), batch.values.numpy(), weights.returns.numpy(), counted.numpy(), clip=clip
    )
    mean = wanted[0].sum() / counted.sum().item()
    # The rows' gradient, by autograd on the plain formula.
    error = (values - weights.returns).square()
    if clip is not None:
        near = batch.values + (values - batch.values).clamp(-clip, clip)
        error = torch.maximum(error, (near - weights.returns).square())
    loss = torch.where(counted, error, 0.0).sum() / 2 / counted.sum()
    assert loss.item() == pytest.approx(mean, abs=1e-9)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]

    model = critic()
    prepare(model)
    total = 0.0
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, **cut)
    found = []
    for one in packs.by_rank[0]:
        columns = Columns.of(one, batch, weights, "cpu", torch.float64)
        given = model(packed=PackedInputs(one, "cpu"))
        found.append(given.detach().numpy())
        share, statistics = value_share(given, columns, tokens=float(counted.sum()), clip=clip)
        share.backward()
        total += share.item()
        assert statistics["tokens"] == (columns.policy > 0).sum()
    assert total == pytest.approx(mean, abs=1e-9)
    np.testing.assert_allclose(
        matrix_of(batch.mask, packs, found), torch.where(batch.mask, values.detach(), 0.0), atol=1e-9
    )
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=0)


def test_shares_of_ranks_add_up_to_the_whole_batch() -> None:
    batch = evaluated()
    weights = PPO().weigh(batch)
    sums = []
    for ranks in (1, 3):
        model = critic().float()
        prepare(model)
        packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=24, ranks=ranks)
        total = 0.0
        for share in shares_of(packs, batch, weights):
            for one, columns in zip(share.packs, share.columns, strict=True):
                values = model(packed=PackedInputs(one, "cpu"))
                total += value_share(values, columns, tokens=share.tokens, clip=0.2)[0].item()
        sums.append(total)
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_an_engine_trains_values_to_the_returns() -> None:
    """Of a fixed batch: the head and the layers must both get gradients, as a new head is 0."""
    engine = DDPEngine(value_model_of_ones(), TrainingOptions(lr=0.01))
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=40).by_rank[0]
    before = [values.clone() for values in engine.packed_values(packs)]
    assert all((values == 0).all() for values in before), "a new head gives 0"
    batch = evaluated(torch.zeros(padded([e.mask for e in DRAWN.episodes], fill=False).shape, dtype=torch.float64))
    # Targets that the tokens before determine: in a group, the first value is the same for all responses.
    last = padded([np.roll(episode.ids, 1) for episode in DRAWN.episodes])
    weights = replace(PPO(value_clip=None).weigh(batch), returns=torch.sin(last.double()))
    columns = [Columns.of(one, batch, weights, "cpu", torch.float32) for one in [*packs, EMPTY]]
    plain: Any = engine.plain
    layer = plain.backbone.layers[0].mlp.up_proj.weight
    start = layer.detach().clone()
    tokens = float((weights.policy > 0).sum())

    def loss(model: Any, part: Any) -> Any:
        return value_share(model(packed=part.inputs), part.columns, tokens=tokens, clip=None)

    reports = [engine.train_step(PackedBatch(packs, columns[:-1], columns[-1]), loss) for _ in range(150)]
    engine.close()
    assert (layer - start).abs().max() > 0.01, "the layers learn too"
    assert reports[-1].loss < 0.05 * reports[0].loss
    assert reports[0].statistics["tokens"] == tokens


def value_model_of_ones() -> ValueModel:
    from tests.engines.training_model import build_policy

    return ValueModel(build_policy(vocabulary=50).base_model)


def test_explained_variance_is_1_for_exact_values_and_0_for_a_constant() -> None:
    batch = evaluated()
    weights = PPO().weigh(batch)
    assert weights.returns is not None
    exact = value_metrics(evaluated(weights.returns), weights)
    constant = value_metrics(evaluated(torch.full_like(weights.returns, 7.0)), weights)
    assert exact["critic/explained_variance"] == pytest.approx(1.0)
    assert constant["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)


def test_a_critic_begins_with_a_new_head_or_with_that_of_a_reward_model(tmp_path: Path) -> None:
    from transformers import Qwen2ForSequenceClassification

    from tests.engines.training_model import build_policy

    policy: Any = build_policy()
    policy.save_pretrained(tmp_path / "policy")
    made: Any = value_model(str(tmp_path / "policy"))
    assert (made.head.weight == 0).all()
    assert torch.equal(made.backbone.embed_tokens.weight, policy.model.embed_tokens.weight)
    policy.config.num_labels = 1
    scorer = Qwen2ForSequenceClassification(policy.config)
    scorer.save_pretrained(tmp_path / "scorer")
    made = value_model(str(tmp_path / "scorer"))
    assert torch.equal(made.head.weight, scorer.score.weight)
    policy.config.num_labels = 3
    Qwen2ForSequenceClassification(policy.config).save_pretrained(tmp_path / "classes")
    made = value_model(str(tmp_path / "classes"))
    assert (made.head.weight == 0).all()


def test_a_batch_without_returns_is_refused() -> None:
    batch = evaluated()
    weights = PPO().weigh(batch)
    one = pack(DRAWN.episodes, token_budget=1000).by_rank[0][0]
    columns = Columns.of(one, batch, weights, "cpu", torch.float32)
    with pytest.raises(ValueError, match="no returns"):
        value_share(torch.zeros(len(one.targets)), replace(columns, returns=None), tokens=1.0, clip=None)


def test_a_critic_of_another_kind_names_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2ForTokenClassification

    from tests.engines.training_model import build_policy

    config = build_policy().config
    config.num_labels = 1
    model = Qwen2ForTokenClassification(config)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(Qwen2ForTokenClassification, "score", None, raising=False)
    monkeypatch.setattr(
        "transformers.AutoModelForTokenClassification.from_pretrained", lambda *_, **__: torch.nn.Identity()
    )
    with pytest.raises(UsageError, match="no linear head named score or classifier"):
        value_model(str(tmp_path))


def values_in_bfloat16(kind: str, adapter: bool) -> list[float]:
    """The values of a critic that an engine computes in bfloat16, in a process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    lora = LoraOptions(rank=4) if adapter else None
    build: Any = FSDP2Engine if kind == "fsdp2" else DDPEngine
    engine = build(critic().float(), TrainingOptions(precision="bfloat16", lora=lora))
    if adapter:  # a new adapter adds 0; a new critic has a head of 0, so that all comes from the adapter
        weights = dict(engine.plain.named_parameters())
        local: list[Any] = [
            getattr(weight, "_local_tensor", weight) for name, weight in weights.items() if "head" in name
        ]
        assert len(local) == 4
        with torch.no_grad():
            for weight, value in zip(local, (0.0, 0.0, 0.3, 0.7), strict=True):
                weight.fill_(value)
    (values,) = engine.packed_values(pack(DRAWN.episodes, token_budget=1000).by_rank[0])
    engine.close()
    dist.destroy_process_group()
    assert values.dtype == torch.float32
    found: list[float] = values.tolist()
    return found


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_values_of_a_critic_in_bfloat16_are_not_rounded_to_it(kind: str, adapter: bool) -> None:
    """In a process of its own, since torch keeps descriptors of a process group."""
    if adapter:
        pytest.importorskip("peft")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        values = torch.tensor(pool.submit(values_in_bfloat16, kind, adapter).result())
    assert values.any() and (values != values.bfloat16().float()).float().mean() > 0.5
    assert ValueHead(4).bfloat16()(torch.ones(1, 4)).dtype == torch.float32


def test_models_in_training_have_no_dropout_unless_they_imitate_given_responses(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=13, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, dropout=0.3, layerdrop=0.3,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])

    def differ(model: Any) -> bool:
        def output() -> torch.Tensor:
            with torch.no_grad():
                found = model(ids)
            return found if isinstance(found, torch.Tensor) else found.logits

        model.train()
        training = output()
        model.eval()
        return not torch.equal(training, output())

    cpu = torch.device("cpu")
    assert differ(causal_model(str(tmp_path), cpu))
    assert not differ(causal_model(str(tmp_path), cpu, dropout=False))
    made = value_model(str(tmp_path))
    with torch.no_grad():
        made.head.weight.fill_(1.0)  # type: ignore[operator]
    assert not differ(made)

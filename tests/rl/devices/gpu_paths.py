"""What GPUs run, on tensors of a GPU without data; run by `test_devices.py` in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from rlmesh import JobInfo, WorkerContext, acting_as
from rlmesh.rl.algorithms import GRPO, PPO, Evaluated, TokenWeights
from rlmesh.rl.components import policy_share, value_share
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.engines.training import pack_check, packed
from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.masking import collected_checks
from rlmesh.rl.packing import Packs, pack
from rlmesh.rl.roles import actor as actor_module
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.device_turns import DeviceTurns
from rlmesh.rl.roles.reference import FrozenPolicy
from rlmesh.rl.roles.reward import ModelScorer
from rlmesh.rl.roles.trained import TRAINING, Share, _on
from rlmesh.rl.roles.value_head import ValueModel
from rlmesh.rl.trainers.batches import shares_of
from rlmesh.rl.trainers.settings import ActorSettings
from tests.rl.devices.fake_gpu import Transfers, fake_gpu
from tests.rl.episodes import VOCABULARY, episodes_of, padded

DRAWN = episodes_of([(3, [4, 0, 7, 2]), (9, [5, 11, 3, 1]), (5, [1, 2, 2, 3]), (1, [6, 6, 4, 2])], 11)
POLICY = GRPO(samples=4, loss="dapo", entropy=0.01, kl=0.1)
KINDS = ["llama", "qwen2"]
GPU = torch.device("cuda")


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    with fake_gpu(monkeypatch) as found:
        yield found


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen2Config(**sizes, tie_word_embeddings=True) if kind == "qwen2" else LlamaConfig(**sizes)
    with GPU:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch_of(algorithm: Any) -> tuple[Packs, Evaluated, TokenWeights]:
    """A batch as the trainer has it, on the CPU."""
    mask = padded([episode.mask for episode in DRAWN.episodes], fill=False)
    count, random = len(DRAWN.episodes), np.random.default_rng(0)
    drawn = [torch.from_numpy(random.normal(size=mask.shape)) for _ in range(4)]
    batch = Evaluated(
        mask, torch.tensor(DRAWN.groups), torch.arange(count).double() % 4, torch.ones(count, dtype=torch.bool),
        log_probs=drawn[0], sampled_log_probs=drawn[1], ref_log_probs=drawn[2], values=drawn[3],
    )  # fmt: skip
    return pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=60), batch, algorithm.weigh(batch)


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Share:
    """Made before the block of fake tensors, as that of another process."""
    return shares_of(*batch_of(getattr(request, "param", POLICY)))[0]


def precision(name: str) -> tuple[torch.dtype, AbstractContextManager[Any]]:
    if name == "autocast":
        return torch.float32, torch.autocast("cuda", torch.bfloat16)
    return getattr(torch, name), nullcontext()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_stay_on_the_gpu(share: Share, transfers: Transfers, kind: str, name: str) -> None:
    dtype, block = precision(name)
    model = model_of(kind, dtype)
    prepare(model)
    for one, columns in zip(share.packs, share.columns, strict=True):
        with block, collected_checks():
            terms = model(packed=PackedInputs(one, GPU), temperature=0.7, chunk_tokens=10)
            loss, statistics = policy_share(terms, _on(GPU, columns), share.normalisers, POLICY)
        loss.backward()
        assert {value.device.type for value in (loss, *statistics.values())} == {"cuda"}
    assert {weight.grad.device.type for weight in model.parameters()} == {"cuda"}
    assert {weight.grad.dtype for weight in model.parameters()} == {dtype}
    assert transfers.names == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # said by peft
@pytest.mark.parametrize(
    ("kind", "variant"), [("qwen2", "float32"), ("llama", "bfloat16"), ("qwen2", "checkpointed"), ("llama", "lora")]
)
def test_a_training_step_waits_for_the_gpu_once(share: Share, transfers: Transfers, kind: str, variant: str) -> None:
    if variant == "lora":
        pytest.importorskip("peft")
    options = TrainingOptions(
        lr=0.1,
        max_grad_norm=1.0,
        precision="float32" if variant == "float32" else "bfloat16",
        activation_checkpointing=variant == "checkpointed",
        lora=LoraOptions(rank=4) if variant == "lora" else None,
    )
    engine = DDPEngine(model_of(kind), options)
    transfers.names.clear()  # sums of a frozen base model, which a checkpoint compares
    role = actor_role(ActorRole, engine, POLICY)
    reports = role.train([share], partial(role.loss, normalisers=share.normalisers))
    assert transfers.names == ["tolist"] * len(reports)
    assert len(reports) == 2 and reports[0].micro_batches > 1


def actor_role(kind: type[Any], engine: Any, algorithm: Any) -> Any:
    """A role that trains on the GPU of this process."""
    role = kind()
    role.engine, role.settings, role.device, role.who = engine, ActorSettings(epochs=2), GPU, ("ACTOR", 0)
    role.run_settings = SimpleNamespace(algorithm=algorithm, seed=0, rollout=SimpleNamespace(temperature=1.0))
    role.turns = DeviceTurns(leased=False)
    role.turns.add(TRAINING, wake=lambda: None, sleep=lambda: None)
    return role


@pytest.fixture
def member() -> Iterator[None]:
    link: Any = None
    with acting_as(WorkerContext(JobInfo("job", "id", None), "ACTOR", 0, 1, link)):
        yield


def test_an_actor_gives_numbers_on_the_host(
    share: Share, member: None, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "memory_share", lambda device: None)
    role = actor_role(ActorRole, DDPEngine(model_of("llama"), TrainingOptions(lr=0.1, precision="bfloat16")), POLICY)
    targets = [len(one.targets) for one in share.packs]
    assert [len(one) for one in role.log_probs(share.packs, 0)] == targets
    role.update([share], 0)
    assert [len(one) for one in role.first_log_probs()] == targets
    frozen = FrozenPolicy(model_of("qwen2"), temperature=1.0)
    assert [len(one) for one in frozen.log_probs(share.packs)] == targets


@pytest.mark.parametrize("share", [PPO()], indirect=True)
@pytest.mark.parametrize("variant", ["float32", "bfloat16", "lora"])
def test_a_critic_gives_numbers_on_the_host(share: Share, member: None, transfers: Transfers, variant: str) -> None:
    if variant == "lora":
        pytest.importorskip("peft")
    with GPU:
        model = ValueModel(model_of("llama").base_model)
    options = TrainingOptions(
        lr=0.1,
        precision="float32" if variant == "float32" else "bfloat16",
        lora=LoraOptions(rank=4) if variant == "lora" else None,
    )
    role = actor_role(CriticRole, DDPEngine(model, options), PPO())
    values = role.values(share.packs, 0)
    assert [(one.dtype, len(one)) for one in values] == [(np.float32, len(one.targets)) for one in share.packs]
    transfers.names.clear()
    role.update([share], 0)
    assert transfers.names == ["tolist"] * 2


@pytest.mark.parametrize("share", [PPO()], indirect=True)
def test_a_head_in_float32_takes_hidden_states_in_bfloat16(share: Share, transfers: Transfers) -> None:
    """So FSDP2 gathers the weights of a critic."""
    with GPU:
        model = ValueModel(model_of("llama", torch.bfloat16).base_model)
    prepare(model)
    for one, columns in zip(share.packs, share.columns, strict=True):
        with collected_checks():
            values = model(packed=PackedInputs(one, GPU))
            assert values.dtype == torch.float32
            value_share(values, _on(GPU, columns), tokens=share.tokens, clip=0.2)[0].backward()
    gradients = [(name.startswith("head."), one.grad) for name, one in model.named_parameters()]
    found = {(of_head, one.device.type, one.dtype) for of_head, one in gradients if one is not None}
    assert found == {(False, "cuda", torch.bfloat16), (True, "cuda", torch.float32)}
    assert transfers.names == []


def test_a_reward_model_gives_its_rewards_in_one_transfer(transfers: Transfers) -> None:
    from transformers import AutoModelForSequenceClassification

    config = model_of("qwen2").config
    config.num_labels, config.pad_token_id = 1, 0
    with GPU:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    scorer = ModelScorer.__new__(ModelScorer)
    scorer.model, scorer.device, scorer.config, scorer.label = model, GPU, config, None
    assert len(scorer._forward([[1, 2, 3], [4]])) == 2
    assert transfers.names == ["tolist"]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", [*KINDS, "critic"])
def test_the_probe_of_packs_stays_on_the_gpu(
    transfers: Transfers, what: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def same(found: Tensor, right: Tensor) -> bool:
        compared.append(((found - right).device.type, found.shape == right.shape, found.dtype == right.dtype))
        return True

    monkeypatch.setattr(pack_check, "_same", same)
    model = model_of("llama" if what == "critic" else what, getattr(torch, name))
    if what == "critic":
        with GPU:
            model = ValueModel(model.base_model)
    monkeypatch.setattr(packed, "can_probe", lambda causal: True)
    prepare(model)
    assert compared == [("cuda", True, True)] * (1 if what == "critic" else 2)
    assert getattr(model, packed.CHECKED) and transfers.names == []


def test_mistakes_are_found(share: Share, transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: on a tensor of the host, and on a value that a pass reads."""
    model = model_of("llama")
    prepare(model)
    inputs = PackedInputs(share.packs[0], GPU)
    for name in ("sources", "targets", "positions"):
        wrong = PackedInputs(share.packs[0], GPU)
        setattr(wrong, name, getattr(inputs, name).cpu())
        transfers.names.clear()
        with pytest.raises(RuntimeError, match="at least two devices"):
            model(packed=wrong)
    terms = model(packed=inputs)
    with pytest.raises(RuntimeError, match="at least two devices"):
        policy_share(terms, share.columns[0], share.normalisers, POLICY)
    with pytest.raises(DataDependentOutputException):
        policy_share(terms, _on(GPU, share.columns[0]), share.normalisers, POLICY)  # checks at once, not at the end
    with pytest.raises(RuntimeError, match="same dtype"):
        model.lm_head(torch.zeros(2, 32, device=GPU, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="to numpy"):
        terms.log_probs.detach().numpy()
    assert transfers.names == []
    terms.log_probs.cpu()
    assert len(transfers.names) == 1

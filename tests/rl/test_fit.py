"""The memory that `fit` predicts from shapes, beside the memory of the tensors of real steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config

from rlmesh.rl.algorithms import GRPO, PPO, Evaluated
from rlmesh.rl.components import Columns, policy_share
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations, layers_of
from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch, PackedInputs, prepare
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.packing import pack
from rlmesh.rl.roles.value_head import ValueModel
from rlmesh.rl.trainers.fit import HEADROOM, PROCESS_BYTES, RoleMemory, fit, training_bytes
from rlmesh.rl.trainers.full_packs import episode_of, fullest_pack
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings
from rlmesh.rl.trainers.tensor_count import TensorCount
from tests.engines.models import sample_batch

TOLERANCE = 0.10
"""The prediction is within this share of what real steps need."""
PROMPT, RESPONSE, SAMPLES = 24, 40, 4
NO_ROOM = 1
"""With so little memory, no largest budget is searched for."""


def no_reward(response: str) -> float:
    return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small model; no weights are needed."""
    place = tmp_path_factory.mktemp("shapes")
    Qwen2Config(
        vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    ).save_pretrained(place)  # fmt: skip
    return place


def run_of(
    folder: Path, *, prompts: int = 8, kl: float = 0.0, rollout: dict[str, Any] | None = None, **actor: Any
) -> Run:
    return Run(
        model=str(folder), data=[], rewards=[no_reward], algorithm=GRPO(samples=SAMPLES, kl=kl), batch_size=prompts,
        max_prompt_tokens=PROMPT, actor=ActorSettings(**{"token_budget": 400, **actor}),
        rollout=RolloutSettings(max_tokens=RESPONSE, **(rollout or {})),
    )  # fmt: skip


def model_of(folder: Path) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("budget", "checkpointing"),
    [*(pytest.param(budget, False, marks=pytest.mark.slow) for budget in (400, 1200)), (1200, True)],
)
def test_training_needs_what_is_predicted(folder: Path, budget: int, checkpointing: bool) -> None:
    prompts = 8 if budget < 1000 else 16
    run = run_of(folder, prompts=prompts, token_budget=budget, activation_checkpointing=checkpointing)
    episodes = [episode_of(PROMPT, RESPONSE) for _ in range(prompts * SAMPLES)]
    (packs,) = pack(episodes, groups=[n // SAMPLES for n in range(len(episodes))], token_budget=budget).by_rank
    assert len(packs) > 1
    time = PROMPT + RESPONSE
    mask = torch.zeros(len(episodes), time, dtype=torch.bool)
    mask[:, PROMPT:] = True
    numbers = torch.full(mask.shape, -6.0, dtype=torch.float64)
    batch = Evaluated(
        mask=mask, groups=torch.arange(len(episodes)) // SAMPLES, rewards=torch.arange(len(episodes)).double() % 3,
        valid=torch.ones(len(episodes), dtype=torch.bool), log_probs=numbers, sampled_log_probs=numbers,
    )  # fmt: skip
    weights = run.algorithm.weigh(batch)
    columns = [Columns.of(one, batch, weights, "cpu", torch.float32) for one in packs]
    model = model_of(folder)

    def loss(model: Any, part: Any) -> Any:
        terms = model(packed=part.inputs, temperature=1.0)
        return policy_share(terms, part.columns, weights.normalisers, run.algorithm)

    count = TensorCount()
    engine = DDPEngine(model, TrainingOptions(activation_checkpointing=checkpointing))
    for parameter in model.parameters():
        count.add(parameter)
    try:
        with count:
            for _ in range(2):  # the first step makes gradients and optimizer state
                count.restart()
                given = PackedBatch(packs, columns, Columns.of(EMPTY, batch, weights, "cpu", torch.float32))
                engine.train_step(given, partial(loss))
    finally:
        engine.close()
    actor = fit(run, NO_ROOM).roles[0]
    predicted = actor.total - actor.process
    print(f"measured {count.peak:,} bytes, predicted {predicted:,}: {predicted / count.peak - 1:+.1%}")
    state = sum(p.numel() * 4 for p in model.parameters())
    # Real packs are not quite full, and the prediction is for a full one.
    fullness = max(map(len, packs)) / budget
    assert predicted == pytest.approx(4 * state + (count.peak - 4 * state) / fullness, rel=TOLERANCE)
    buffers = sum(b.numel() * 4 for b in model.buffers())
    assert (actor.weights, actor.gradients, actor.optimizer) == (state + buffers, state, 2 * state)


def test_checkpointing_is_seen_in_the_prediction(folder: Path) -> None:
    plain = training_bytes(run_of(folder), 1000)
    assert training_bytes(run_of(folder, activation_checkpointing=True), 1000) < 0.7 * plain
    assert training_bytes(run_of(folder, precision="bfloat16"), 1000) < 0.85 * plain


def test_sampling_needs_what_is_predicted(folder: Path) -> None:
    run = run_of(folder, rollout={"engines": 2})
    rollout = fit(run, NO_ROOM).roles[1]
    model = model_of(folder).eval()
    rows = 8 * SAMPLES // 2
    count = TensorCount()
    for parameter in model.parameters():
        count.add(parameter)
    with count:
        samples = sample_batch(
            model, [[1] * PROMPT] * rows, SamplingParams(RESPONSE, temperature=1.0, seed=0), stop_token_ids=[]
        )
    assert [len(sample.token_ids) for sample in samples] == [RESPONSE] * rows
    weights = rollout.weights // 2  # the engine keeps two sets; sample_batch alone has one
    predicted = weights + rollout.cache + rollout.activations
    print(f"measured {count.peak:,} bytes, predicted {predicted:,}: {predicted / count.peak - 1:+.1%}")
    assert predicted == pytest.approx(count.peak, rel=TOLERANCE)
    width, tokens = 64 // 4, rows * (PROMPT + RESPONSE)
    assert rollout.cache == 3 * 2 * 2 * width * 4 * tokens  # layers × (keys, values) × heads × width × bytes


def test_the_reference_needs_what_is_predicted(folder: Path) -> None:
    run = run_of(folder, kl=0.1)
    (reference,) = (role for role in fit(run, NO_ROOM).roles if role.role == "REFERENCE")
    model = model_of(folder)
    prepare(model)
    count = TensorCount()
    for parameter in model.parameters():
        count.add(parameter)
    held = count.live
    with count, torch.no_grad():
        model(packed=PackedInputs(fullest_pack(400, PROMPT, RESPONSE, SAMPLES, 8), "cpu"), temperature=1.0)
    assert reference.activations == pytest.approx(count.peak - held, rel=TOLERANCE)


@pytest.mark.slow
def test_the_largest_budget_fits_and_a_larger_one_does_not(folder: Path) -> None:
    run = run_of(folder)
    room = 1_120 * 2**20
    found = fit(run, room)
    assert found.largest is not None and found.largest > 64
    free = room * HEADROOM - sum(role.total for role in found.roles[1:])

    largest, larger = (
        fit(run_of(folder, token_budget=budget), room) for budget in (found.largest, int(found.largest * 1.1))
    )
    assert largest.roles[0].total <= free < larger.roles[0].total
    assert largest.fits and larger.fits is False


def test_too_little_memory_is_told_and_much_takes_a_step_in_one_pass(folder: Path) -> None:
    run = run_of(folder)
    none = fit(run, 2 * PROCESS_BYTES["cpu"])
    assert none.largest == 0 and none.fits is False and "largest actor.token_budget that fits: none" in str(none)
    assert fit(run, 2**40).largest == 8 * SAMPLES * (PROMPT + RESPONSE)


def test_gpus_are_predicted_without_one(folder: Path) -> None:
    run = Run(**{**vars(run_of(folder)), "devices_per_node": 1})
    found = fit(run, 2**30)
    on_cpu = fit(run_of(folder), 2**33)
    assert found.roles[0].activations == pytest.approx(on_cpu.roles[0].activations, rel=0.2)
    if not torch.cuda.is_available():
        assert fit(run).fits is None and "--memory" in str(fit(run))


def critic_of(folder: Path) -> ValueModel:
    torch.manual_seed(0)
    return ValueModel(AutoModel.from_config(Qwen2Config.from_pretrained(folder), dtype=torch.float32))


def peak_of_values(model: ValueModel, tokens: int, *, autocast: bool, checkpointing: bool) -> int:
    """The peak of a real pass over the critic's fullest pack, beyond weights and gradients."""
    prepare(model)
    if checkpointing:
        checkpoint_activations(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    count = TensorCount()
    for tensor in (*model.parameters(), *model.buffers()):
        count.add(tensor)
        if tensor.grad is not None:
            count.add(tensor.grad)
    held = count.live
    with count:
        inputs = PackedInputs(fullest_pack(tokens, PROMPT, RESPONSE, 1, 8), "cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = model(packed=inputs)
        assert values.dtype == torch.float32
        values.sum().backward()
    return count.peak - held


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        ("bfloat16", True),
    ],
)
def test_a_critic_is_predicted_by_its_own_settings(folder: Path, precision: Any, checkpointing: bool) -> None:
    settings = CriticSettings(token_budget=300, ranks=2, precision=precision, activation_checkpointing=checkpointing)
    found = fit(Run(**{**vars(run_of(folder)), "algorithm": PPO(), "critic": settings}), NO_ROOM)
    (critic,) = (role for role in found.roles if role.role == "CRITIC")
    model, half = critic_of(folder), precision == "bfloat16"
    state = sum(p.numel() * 4 for p in model.parameters())  # with the head of values
    buffers = sum(b.numel() * 4 for b in model.buffers())
    assert critic.members == 2
    assert (critic.weights, critic.gradients, critic.optimizer) == (state + buffers, state, 2 * state)
    assert critic.weights < found.roles[0].weights  # no head of a language model
    measured = peak_of_values(model, 300, autocast=half, checkpointing=checkpointing)
    assert critic.activations == pytest.approx(measured, rel=0.01)
    if half:
        # FSDP2 gathers weights in bfloat16, so hidden states are bfloat16 and the head copies them to float32. The copy
        # is smaller than what autocast keeps in float32, by which passes are predicted.
        model = critic_of(folder)
        model.backbone.to(torch.bfloat16)
        measured = peak_of_values(model, 300, autocast=False, checkpointing=checkpointing)
        assert 0.6 * critic.activations < measured <= critic.activations


@pytest.mark.slow
def test_a_sharded_critic_has_its_whole_head_while_it_computes(folder: Path) -> None:
    """FSDP2 gathers the head by itself and in float32, whatever the precision, and so is its gradient."""

    def critic(train: str) -> RoleMemory:
        settings = CriticSettings(token_budget=300, ranks=2, precision="bfloat16")
        run = Run(**{**vars(run_of(folder)), "algorithm": PPO(), "critic": settings, "train": train})
        return next(role for role in fit(run, NO_ROOM).roles if role.role == "CRITIC")

    model = critic_of(folder)
    layers = [sum(p.numel() * 4 for p in layer.parameters()) for layer in layers_of(model)]
    outside = sum(p.numel() * 4 for p in model.parameters()) - sum(layers)
    assert outside > sum(p.numel() * 4 for p in model.head.parameters()) == 4 * 65
    assert critic("fsdp2").activations - critic("ddp").activations == 2 * outside + 4 * max(layers)


def test_roles_that_share_a_device_take_turns(folder: Path) -> None:
    def found(room: int, **more: Any) -> Any:
        return fit(Run(**{**vars(run_of(folder)), "devices_per_node": 1, **more}), room)

    two = 2 * PROCESS_BYTES["cuda"]
    assert found(two, placement="separate").largest > 0  # each has a device for itself
    assert found(two, placement="shared").largest == 0  # two processes alone fill the device
    assert found(2**31, placement="shared").fits


@pytest.mark.slow
def test_sharded_engines_hold_their_share(folder: Path) -> None:
    def actor(train: str) -> Any:
        return fit(Run(**{**vars(run_of(folder, ranks=4)), "train": train}), NO_ROOM).roles[0]

    whole = actor("ddp")
    assert actor("zero1").optimizer == pytest.approx(whole.optimizer / 4, abs=4)
    assert actor("zero2").gradients == pytest.approx(whole.gradients / 4, abs=4)
    for kind in ("fsdp2", "zero3"):
        assert actor(kind).weights == pytest.approx(whole.weights / 4, rel=0.01)
        assert actor(kind).activations > whole.activations


def test_the_fullest_pack_is_full() -> None:
    for budget in (64, 100, 200, 333, 1000):
        full = fullest_pack(budget, PROMPT, RESPONSE, SAMPLES, 8)
        assert len(full) == max(budget, PROMPT + RESPONSE) or len(full) >= 8 * (PROMPT + SAMPLES * RESPONSE)
    assert len(fullest_pack(10, PROMPT, RESPONSE, SAMPLES, 8)) == PROMPT + RESPONSE
    assert np.all(fullest_pack(10_000, PROMPT, RESPONSE, SAMPLES, 1).rows < SAMPLES)

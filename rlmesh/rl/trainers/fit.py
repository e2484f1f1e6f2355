"""`fit`: the memory of each role of a run, predicted from shapes, and the largest token budget that fits.

Nothing is started and no weight is read. The model is made from its configuration, with tensors that have shapes but no
data. It makes one forward and backward pass over the fullest pack, and one sampling step at full length. Meanwhile
:mod:`rlmesh.rl.trainers.tensor_count` counts the bytes of the tensors that exist at the same time. So the prediction
comes from the model's own code. Memory outside of tensors is covered by constants: `PROCESS_BYTES`, and `HEADROOM` for
fragmentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations, layers_of
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.head import CHUNK_TOKENS
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.roles.defaults import dropout_rates
from rlmesh.rl.roles.value_head import ValueModel
from rlmesh.rl.trainers.full_packs import fullest_pack
from rlmesh.rl.trainers.tensor_count import TensorCount

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["HEADROOM", "PROCESS_BYTES", "Fit", "RoleMemory", "fit", "training_bytes"]

PROCESS_BYTES = {"cpu": 500 * 2**20, "cuda": 600 * 2**20}
"""Memory of a process of torch without any tensor: libraries on a CPU, the context and its kernels on a GPU."""
HEADROOM = 0.92
"""The usable share of a device's memory; the rest is for fragmentation and workspaces of kernels."""


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one member of a role, in bytes.

    Attributes:
        role: name of the role.
        members: number of members.
        weights, gradients, optimizer: the parts that this member holds.
        activations: peak of a pass or an optimizer step, beyond weights, gradients, optimizer and cache.
        cache: keys and values of all its responses at full length.
        process: memory of the process before it has any tensor.
    """

    role: str
    members: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache + self.process


@dataclass(frozen=True)
class Fit:
    """The prediction for a run.

    Attributes:
        roles: the memory of a member of each role, at the run's token budget.
        device: ``each GPU`` or ``each node``.
        device_bytes: memory of the device; ``None``: unknown.
        token_budget: the run's ``actor.token_budget``.
        step_tokens: the most tokens of a rank in one step; a larger budget has no effect.
        largest: the largest token budget that fits, at most ``step_tokens``; 0: none does; ``None``: the memory of the
            device is unknown.
        notes: limits of the prediction.
    """

    roles: tuple[RoleMemory, ...]
    device: str
    device_bytes: int | None
    token_budget: int
    step_tokens: int
    largest: int | None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """True if the run's own budget fits; ``None``: unknown."""
        return None if self.largest is None else self.largest >= min(self.token_budget, self.step_tokens)

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "cache", "process", "total")
        lines = [f"{'role':10} {'members':>7}" + "".join(f"{name:>12}" for name in names) + "   (GiB per member)"]
        for role in self.roles:
            numbers = "".join(f"{getattr(role, name) / 2**30:12.3f}" for name in names)
            lines.append(f"{role.role:10} {role.members:7}{numbers}")
        room = "unknown: give --memory" if self.device_bytes is None else f"{self.device_bytes / 2**30:.1f} GiB"
        lines.append(f"memory of {self.device}: {room}")
        verdict = {True: "fits", False: "does not fit", None: "not compared"}[self.fits]
        lines.append(f"actor.token_budget={self.token_budget}: {verdict}")
        if self.largest is not None:
            whole = ", all tokens of a step in one pass" if self.largest == self.step_tokens else ""
            lines.append(f"largest actor.token_budget that fits: {self.largest or 'none'}{whole}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def fit(run: Run, device_bytes: int | None = None) -> Fit:
    """Predict the memory of a run.

    On GPUs each member of a role has a device for itself, unless the run's roles share devices: then they take turns,
    and a role that waits keeps only the memory of its process. On CPUs all members of a node share its memory.

    Args:
        run: the settings.
        device_bytes: memory of a device; ``None``: the memory of this machine's first GPU or, for a run on CPUs, of
            this machine.
    """
    if run.algorithm.responses == "ranked":
        raise UsageError("the memory of a reward model in training is not predicted")
    shapes = _Shapes(run)
    room = _room(run) if device_bytes is None else device_bytes
    budget = run.actor.token_budget
    roles = [shapes.actor(budget), *shapes.others()]
    largest = None if room is None else _largest(shapes, roles[1:], int(room * HEADROOM))
    device = f"each {'GPU' if run.devices_per_node else 'node'}"
    return Fit(tuple(roles), device, room, budget, shapes.per_rank, largest, tuple(shapes.notes))


def training_bytes(run: Run, tokens: int) -> int:
    """Peak memory, beyond weights and gradients, of the actor's forward and backward pass over a pack of ``tokens``
    tokens."""
    return _Shapes(run).training(run.actor, tokens)


class _Shapes:
    """Passes over the run's model with tensors that have shapes but no data."""

    def __init__(self, run: Run) -> None:
        from transformers import AutoConfig

        self.run, self.notes = run, list[str]()
        self.critic_settings: Any = getattr(run, "critic", None) if "critic" in run.algorithm.needs else None
        self.config = self.critic_config = AutoConfig.from_pretrained(run.model)
        if self.critic_settings is not None and getattr(self.critic_settings, "model", None):
            self.critic_config = AutoConfig.from_pretrained(self.critic_settings.model)
        for config in (self.config, self.critic_config) if run.algorithm.responses != "given" else ():
            for rate in dropout_rates(config):
                setattr(config, rate, 0.0)
        self.kind = "cuda" if run.devices_per_node else "cpu"
        # A torch without CUDA cannot make such tensors. "meta" tensors take the same path in attention.
        self.device = self.kind if self.kind == "cpu" or torch.backends.cuda.is_built() else "meta"
        if self.device == "meta" and run.actor.precision != "float32":
            self.notes.append("this torch has no CUDA: activations are predicted in float32, an upper limit")
        if getattr(getattr(run.actor, "lora", None), "rank", 0):
            self.notes.append("gradients and optimizer are predicted for all weights; an adapter (LoRA) needs far less")
        if any(hasattr(reward, "members") for reward in run.rewards):
            self.notes.append("reward models are not predicted")
        with self.without_data():
            model: Any = self.model()
            self.weights = _bytes_of(model)
            self.vocabulary = model.get_output_embeddings().weight.shape[0]
        self.rows = -(-run.batch_size * run.algorithm.samples // run.rollout.engines)
        self.length = run.max_prompt_tokens + run.response_tokens
        self.per_rank = -(-run.batch_size * run.algorithm.samples * self.length // run.actor.ranks)

    @contextmanager
    def without_data(self, device: str | None = None) -> Iterator[None]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = nullcontext() if (device or self.device) == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            yield

    def model(self, device: str | None = None) -> nn.Module:
        from transformers import AutoModelForCausalLM

        with torch.device(device or self.device):
            model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        return model

    def value_model(self) -> nn.Module:
        """The critic with its head, which computes in float32 whatever the precision."""
        from transformers import AutoModel

        with torch.device(self.device):
            return ValueModel(AutoModel.from_config(self.critic_config, dtype=torch.float32))

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        if precision != "bfloat16" or self.device == "meta":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def inputs(self, tokens: int, count: TensorCount) -> PackedInputs:
        """The fullest pack of at most ``tokens`` tokens."""
        run = self.run
        pack = fullest_pack(tokens, run.max_prompt_tokens, run.response_tokens, run.algorithm.samples, run.batch_size)
        with count:
            return PackedInputs(pack, self.device)

    def training(self, settings: Any, tokens: int) -> int:
        """As `training_bytes`, for the model that ``settings`` belong to: the actor or the critic."""
        count, critic = TensorCount(), settings is self.critic_settings
        inputs = self.inputs(tokens, count)
        with self.without_data():
            model = self.value_model() if critic else self.model()
            prepare(model)
            if settings.activation_checkpointing:
                checkpoint_activations(model)
            model.train()
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            held = _hold(count, model)
            with count:
                with self.autocast(settings.precision):
                    if critic:
                        loss = model(packed=inputs).sum()
                    else:
                        terms = model(packed=inputs, temperature=self.run.rollout.temperature)
                        loss = terms.log_probs.sum() + terms.entropy.sum()
                loss.backward()
            return count.peak - held

    def evaluating(self, tokens: int) -> int:
        """Peak memory, beyond the weights, of a forward pass without gradient."""
        count = TensorCount()
        inputs = self.inputs(tokens, count)
        with self.without_data(), torch.no_grad():
            model = self.model()
            prepare(model)
            held = _hold(count, model)
            with count:
                model(packed=inputs, temperature=self.run.rollout.temperature)
            return count.peak - held

    def sampling(self, rows: int) -> tuple[int, int]:
        """Bytes of the cache of ``rows`` responses at full length, and the peak beyond cache and weights."""
        from rlmesh.rl.engines.rollout import SamplingParams
        from rlmesh.rl.engines.sampling import log_distribution

        prompt, params = self.run.max_prompt_tokens, SamplingParams(1, temperature=self.run.rollout.temperature)
        # transformers reads values of the mask, which "meta" tensors lack, so the pass has fake CPU tensors.
        device = "cpu" if self.device == "meta" else self.device
        with self.without_data(device), torch.no_grad():
            model = self.model(device).eval()

            def step(tokens: int, before: int, **past: Any) -> Any:
                attend = torch.ones(rows, before + tokens, dtype=torch.long, device=device)
                ids = attend[:, :tokens]
                out: Any = model(
                    input_ids=ids, attention_mask=attend, position_ids=ids, use_cache=True, logits_to_keep=1, **past
                )
                # Stands for `draw`: the sampling distribution, and noise of the same shape.
                log_probs = log_distribution(out.logits[:, -1], params)
                noise = torch.empty_like(log_probs)
                del log_probs, noise
                return out

            count = TensorCount()
            held = _hold(count, model)
            with count:
                out = step(prompt, 0)
            name = "cache" if "cache" in out else "past_key_values"
            at_start = count.peak - held
            full = self.length - 1
            past = {name: step(full, 0)[name]}
            del out
            cache = _tensors_of_cache(past[name])
            grown = sum(tensor.untyped_storage().nbytes() for tensor in cache)
            for tensor in cache:
                count.add(tensor)
            del cache, tensor
            count.restart()
            with count:
                step(1, full, **past)
            at_end = count.peak - held
            grown += grown // full
        return grown, max(max(at_start, at_end) - grown, 0)

    def actor(self, budget: int) -> RoleMemory:
        """One rank of the actor."""
        return self.trained("ACTOR", self.run.actor, budget)

    def trained(self, role: str, settings: Any, budget: int) -> RoleMemory:
        """One rank of a role that trains."""
        with self.without_data():
            model = self.value_model() if settings is self.critic_settings else self.model()
            held, whole = _bytes_of(model), _bytes_of(model, buffers=False)
            layers = [_bytes_of(layer, buffers=False) for layer in layers_of(model)]
        kind, share = self.run.train, -(-whole // settings.ranks)
        weights, gradients, optimizer, gathered = held, whole, 2 * whole, 0
        if kind in ("fsdp2", "zero3"):
            # Not sharded at the peak: parameters and gradients outside of the layers, and those of two layers (the
            # current layer, and the next one, which is fetched ahead).
            gathered = 2 * (whole - sum(layers)) + 4 * max(layers, default=0)
            weights, gradients, optimizer = share + held - whole, share, 2 * share
        elif kind in ("zero1", "zero2"):
            optimizer = 2 * share
            gradients = share if kind == "zero2" else whole
        # On a GPU the optimizer's step has temporaries of the size of the weights that it changes.
        step = 0 if self.kind == "cpu" else whole if kind == "ddp" else share
        needed = max(self.training(settings, budget) + gathered, step)
        process = PROCESS_BYTES[self.kind]
        return RoleMemory(role, settings.ranks, weights, gradients, optimizer, needed, process=process)

    def others(self) -> Iterator[RoleMemory]:
        """The other roles that hold a model."""
        run, process = self.run, PROCESS_BYTES[self.kind]
        if run.algorithm.responses != "sampled":
            pass  # the data have the responses
        elif run.rollout.engine == "transformers":
            cache, above = self.sampling(self.rows)
            copies = 1 if run.rollout.options.get("mode") == "in_place" else 2
            yield RoleMemory("ROLLOUT", run.rollout.engines, copies * self.weights, 0, 0, above, cache, process)
        else:
            cache, above = self.sampling(1)
            self.notes.append(
                "vLLM takes the share of the device that rollout.options.gpu_memory_utilization gives it (0.9 if not "
                "set) for its cache; shown is what one response of full length needs"
            )
            yield RoleMemory("ROLLOUT", run.rollout.engines, self.weights, 0, 0, above, cache, process)
        if "reference" in run.algorithm.needs:
            above = self.evaluating(run.actor.token_budget)
            if run.reference.model is not None:
                self.notes.append("reference.model is shown with the size of the run's model")
            yield RoleMemory("REFERENCE", 1, self.weights, activations=above, process=process)
        if any(isinstance(one, RewardModel) for one in run.scored):
            self.notes.append("the memory of reward models is not predicted")
        if self.critic_settings is not None:
            yield self.trained("CRITIC", self.critic_settings, self.critic_settings.token_budget)


def _largest(shapes: _Shapes, others: list[RoleMemory], room: int) -> int:
    """The largest token budget with which each device, or each node of CPUs, holds its members."""
    run = shapes.run
    if shapes.kind == "cpu":
        per_node = -(-run.actor.ranks // run.nodes)
        room = (room - sum(one.total * -(-one.members // run.nodes) for one in others)) // per_node
    else:
        # Roles that share a device take turns: the others keep only the memory of their processes there.
        shared = getattr(run, "placed", "separate") != "separate"
        processes = sum(one.process for one in others) if shared else 0
        if any(one.total + (processes if shared else 0) > room for one in others):
            return 0
        room -= processes
    least, most = min(shapes.length, shapes.per_rank), shapes.per_rank

    def needed(budget: int) -> int:
        return shapes.actor(budget).total

    if needed(most) <= room:
        return most
    # An episode is never cut, so a budget below one episode saves nothing.
    lower, at_lower = least, needed(least)
    if at_lower > room:
        return 0
    # Above one chunk of the head, memory grows linearly, so interpolate; each guess is measured by a pass.
    upper, at_upper = most, needed(max(most, CHUNK_TOKENS))
    for _ in range(12):
        if upper - lower <= max(64, lower // 50):
            break
        slope = (at_upper - at_lower) / (upper - lower)
        guess = lower + int((room - at_lower) / slope) if slope > 0 else (lower + upper) // 2
        guess = min(max(guess, lower + (upper - lower) // 50 + 1), upper - 1)
        at = needed(guess)
        if at <= room:
            lower, at_lower = guess, at
        else:
            upper, at_upper = guess, at
    return lower


def _room(run: Run) -> int | None:
    if run.devices_per_node:
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes_of(module: nn.Module, *, buffers: bool = True) -> int:
    """The memory of parameters and buffers, shared ones once."""
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _hold(count: TensorCount, model: nn.Module) -> int:
    """Add weights and gradients to the count, so that views of them are not counted as new tensors; returns their
    bytes."""
    before = count.live
    for tensor in (*model.parameters(), *model.buffers()):
        count.add(tensor)
        if tensor.grad is not None:
            count.add(tensor.grad)
    count.restart()
    return count.live - before


def _tensors_of_cache(cache: Any) -> list[torch.Tensor]:
    """Keys and values of a cache of transformers."""
    layers = getattr(cache, "layers", None) or ()
    found = [value for layer in layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in found if tensor.ndim >= 3]

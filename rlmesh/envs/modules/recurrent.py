"""Memory between encoder and heads: an LSTM, or a gated transformer over the last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlmesh.envs.modules.activations import tanh
from rlmesh.envs.modules.encoders import encoder_of
from rlmesh.errors import UsageError

__all__ = [
    "ATTENTION_DEFAULTS", "LSTM_DEFAULTS", "AttentionMemory", "LSTMMemory", "Memory", "RememberedFeatures",
    "SequenceSteps", "memory_of",
]  # fmt: skip

LSTM_DEFAULTS: dict[str, Any] = {"use_lstm": False, "lstm_cell_size": 256, "max_seq_len": 20}
"""``max_seq_len``: learners cut episodes into sequences of this length; attention uses it too."""
ATTENTION_DEFAULTS: dict[str, Any] = {
    "use_attention": False,
    "attention_num_transformer_units": 1,
    "attention_dim": 64,
    "attention_num_heads": 1,
    "attention_head_dim": 32,
    "attention_memory_inference": 50,
    "attention_memory_training": 50,
    "attention_position_wise_mlp_dim": 32,
    "attention_init_gru_gate_bias": 2.0,
}
"""Settings of `AttentionMemory`, by the names of RLlib."""
State = Mapping[str, torch.Tensor]


class Memory(nn.Module):
    """Base of memories: from features ``[sequences, time, inputs]`` to features ``[sequences, time, size]``.

    A pass over a sequence gives the same results as passes over its steps, one after the other.

    Attributes:
        size: number of features that come out.
    """

    size: int

    def initial_state(self) -> dict[str, torch.Tensor]:
        """The state before the first step, tensors without the axis of sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no initial_state")

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The features that come out, and the state after the last step."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


class LSTMMemory(Memory):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; bias 1 of the forget gate: Gers et al. 2000).

    The state is ``h`` and ``c``, each ``[size]``.
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.lstm = nn.LSTM(inputs, size, batch_first=True)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        bias: Any = self.lstm.bias_hh_l0
        nn.init.ones_(bias[size : 2 * size])

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": torch.zeros(self.size), "c": torch.zeros(self.size)}

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        before = tuple(state[name].unsqueeze(0).contiguous() for name in ("h", "c"))
        out, (h, c) = self.lstm(x, before)
        return out, {"h": h.squeeze(0), "c": c.squeeze(0)}


class AttentionMemory(Memory):
    """The gated transformer of Parisotto et al. 2020 ("GTrXL"), which attends to the last ``steps`` steps.

    Each unit attends to its own inputs at the last steps of the episode and at the step itself. Normalisation comes
    before attention and MLP, and a GRU gate takes the place of each residual connection. Differences to the paper: the
    scores have one learnt bias for each head and distance (Raffel et al. 2020, section 2.1, without buckets) instead of
    the relative encoding of Transformer-XL; nothing before the start of an episode is attended to.

    The state is ``memory`` ``[units, steps, dim]``, the inputs of the units at the last steps, the newest one last, and
    ``length``, the number of these steps that the episode had.

    Args:
        inputs: number of features that come in.
        dim: width between the units.
        units: number of units.
        heads, head_dim: number and width of heads of attention.
        mlp_dim: width of the MLP of a unit.
        steps: number of steps before the current one that a unit attends to.
        gate_bias: at the start, larger values let more of a unit's input pass.
    """

    def __init__(
        self, inputs: int, *, dim: int, units: int, heads: int, head_dim: int, mlp_dim: int, steps: int,
        gate_bias: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.steps = dim, steps
        self.embed = nn.Linear(inputs, dim)
        self.units = nn.ModuleList(
            [GatedTransformerUnit(dim, heads, head_dim, mlp_dim, steps, gate_bias) for _ in range(units)]
        )

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {
            "memory": torch.zeros(len(self.units), self.steps, self.size),
            "length": torch.zeros((), dtype=torch.int64),
        }

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        memory, length = state["memory"], state["length"]
        x, after = self.embed(x), []
        for i, unit in enumerate(self.units):
            after.append(torch.cat([memory[:, i], x], 1)[:, -self.steps :])
            x = unit(x, memory[:, i], length)
        return x, {"memory": torch.stack(after, 1), "length": (length + x.shape[1]).clamp(max=self.steps)}


class GatedTransformerUnit(nn.Module):
    """One unit of `AttentionMemory`: attention, then an MLP, each with a gate (Parisotto et al. 2020, section 3)."""

    def __init__(self, dim: int, heads: int, head_dim: int, mlp_dim: int, steps: int, gate_bias: float) -> None:
        super().__init__()
        self.heads, self.steps = heads, steps
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.of_distance = nn.Parameter(torch.zeros(heads, steps + 1))
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, dim), nn.ReLU())
        self.attention_gate, self.mlp_gate = GRUGate(dim, gate_bias), GRUGate(dim, gate_bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Inputs ``[sequences, time, dim]``, those of earlier steps ``[sequences, steps, dim]``, of which the last
        ``length`` ``[sequences]`` are there; returns outputs like the inputs."""
        steps, time = self.steps, x.shape[1]
        both = self.before_attention(torch.cat([memory, x], 1))
        query = self._by_head(self.query(both[:, steps:]))
        key, value = (self._by_head(part) for part in self.key_value(both).chunk(2, -1))
        place = torch.arange(steps + time, device=x.device)
        distance = place[steps:, None] - place
        within = (distance >= 0) & (distance <= steps)
        there = place >= steps - length[:, None]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores + self.of_distance[:, distance.clamp(0, steps)]
        scores = scores.masked_fill(~(within & there[:, None])[:, None], -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = self.attention_gate(x, torch.relu(self.out(attended)))
        result: torch.Tensor = self.mlp_gate(x, self.mlp(self.before_mlp(x)))
        return result

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """``[sequences, time, heads · width]`` as ``[sequences, heads, time, width]``."""
        result: torch.Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return result


class GRUGate(nn.Module):
    """Joins a stream x and an update y as a GRU does (Parisotto et al. 2020, section 3.2).

    r = σ(W_r y + U_r x), z = σ(W_z y + U_z x − b), h = tanh(W_h y + U_h (r ⊙ x)); the result is (1 − z) ⊙ x + z ⊙ h.
    """

    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.of_update = nn.Linear(dim, 3 * dim, bias=False)
        self.of_stream = nn.Linear(dim, 2 * dim, bias=False)
        self.of_kept = nn.Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), float(bias)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        reset_y, update_y, new_y = self.of_update(y).chunk(3, -1)
        reset_x, update_x = self.of_stream(x).chunk(2, -1)
        update = torch.sigmoid(update_y + update_x - self.bias)
        new = tanh(new_y + self.of_kept(torch.sigmoid(reset_y + reset_x) * x))
        return (1 - update) * x + update * new


def memory_of(config: Mapping[str, Any], inputs: int) -> Memory | None:
    """The memory of a model's settings, behind an encoder of ``inputs`` features; None if there is to be none.

    Raises:
        UsageError: settings that cannot work.
    """
    attends = config.get("use_attention", False)
    if not config["use_lstm"] and not attends:
        return None
    if config["use_lstm"] and attends:
        raise UsageError("model_config: use_lstm and use_attention exclude each other; set one of them")
    names = ["max_seq_len", "lstm_cell_size"] if config["use_lstm"] else ["max_seq_len", *map(str, ATTENTION_DEFAULTS)]
    for name in names:
        if name not in ("use_attention", "attention_init_gru_gate_bias") and not _is_count(config[name]):
            raise UsageError(f"model_config {name}: a whole number of at least 1, not {config[name]!r}")
    if config["use_lstm"]:
        return LSTMMemory(inputs, config["lstm_cell_size"])
    steps = config["attention_memory_inference"]
    if steps != config["attention_memory_training"]:
        raise UsageError(
            f"model_config: attention_memory_inference={steps} and attention_memory_training="
            f"{config['attention_memory_training']} must be equal: otherwise another function is trained than acts"
        )
    return AttentionMemory(
        inputs, dim=config["attention_dim"], units=config["attention_num_transformer_units"],
        heads=config["attention_num_heads"], head_dim=config["attention_head_dim"],
        mlp_dim=config["attention_position_wise_mlp_dim"], steps=steps,
        gate_bias=config["attention_init_gru_gate_bias"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SequenceSteps:
    """Steps of sequences, of which a network with memory is to give results.

    Attributes:
        obs: ``[sequences, time, …]``.
        states: before the first steps, by name, each ``[sequences, …]``.
        sequence, time: place of each step, both ``[rows]``.
    """

    obs: torch.Tensor
    states: State
    sequence: torch.Tensor
    time: torch.Tensor


class RememberedFeatures(nn.Module):
    """An encoder and a memory behind it, for networks that have a memory of their own within a module.

    Args:
        space: of observations.
        config: settings of encoder and memory.
        prefix: of the names of its states among those of the module.

    Attributes:
        size: number of features that come out.
    """

    def __init__(self, space: Any, config: Mapping[str, Any], prefix: str) -> None:
        super().__init__()
        self.encoder, width = encoder_of(space, config)
        memory = memory_of(config, width)
        assert memory is not None
        self.memory, self.size, self.prefix = memory, memory.size, prefix
        self._names = list(memory.initial_state())

    def initial_state(self) -> dict[str, torch.Tensor]:
        """The state before the first step, by prefixed names."""
        return {self.prefix + name: state for name, state in self.memory.initial_state().items()}

    def over(self, obs: torch.Tensor, states: State) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The features of sequences, ``[sequences, time, size]``, and the states after them, by prefixed names."""
        own = {name: states[self.prefix + name] for name in self._names}
        features, after = self.memory(self.encoder(obs), own)
        return features, {self.prefix + name: state for name, state in after.items()}

    def forward(self, steps: SequenceSteps) -> torch.Tensor:
        """The features of the steps, ``[rows, size]``, by a pass over the sequences that they are in."""
        return self.over(steps.obs, steps.states)[0][steps.sequence, steps.time]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1

"""The values that settings of the built-in modules may have (``model`` and ``model_config``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.settings.allowed import FLAG, Allowed, faults_of, list_of, number, one_of, optional, whole

__all__ = [
    "ACTIVATION_NAMES", "INITIALIZERS", "MODEL_ALLOWED", "MODEL_KEYS", "OFF_POLICY_KEYS", "OF_ACTOR_CRITIC",
    "keys_of_module", "model_faults", "unknown_keys",
]  # fmt: skip

ACTIVATION_NAMES = ("tanh", "relu", "silu", "elu", "gelu")
INITIALIZERS = ("orthogonal", "torch")
_COUNT = whole(1, 1_000_000)


def _is_convolution(layer: Any) -> bool:
    channels, *sizes = layer  # a kernel or stride is one number, or one for each axis
    pairs = [size if isinstance(size, list | tuple) else (size, size) for size in sizes]
    return (
        len(pairs) == 2
        and _COUNT.accepts(channels)
        and all(len(pair) == 2 and all(map(_COUNT.accepts, pair)) for pair in pairs)
    )


MODEL_ALLOWED: dict[str, Allowed] = {
    "fcnet_hiddens": list_of(_COUNT, "a list of widths, whole numbers of at least 1, such as [64, 64]"),
    "fcnet_activation": one_of(*ACTIVATION_NAMES),
    "conv_filters": optional(list_of(Allowed("", _is_convolution), "a list of [channels, kernel, stride]")),
    "log_std_init": number(-20, 20),
    "initializer": one_of(*INITIALIZERS),
    "attention_init_gru_gate_bias": number(-100, 100),
    **dict.fromkeys(("dueling", "use_attention", "use_lstm"), FLAG),
    "vf_share_layers": optional(FLAG),
    **dict.fromkeys(
        (
            "conv_features", "lstm_cell_size", "max_seq_len", "attention_num_transformer_units", "attention_dim",
            "attention_num_heads", "attention_head_dim", "attention_memory_inference", "attention_memory_training",
            "attention_position_wise_mlp_dim",
        ),
        _COUNT,
    ),
}  # fmt: skip
"""By the names of the settings; a module of one's own has the rules of its ``allowed_settings``."""
MODEL_KEYS = frozenset(MODEL_ALLOWED) - {"dueling"}
"""The keys of the built-in module of a policy with a value function."""
OF_ACTOR_CRITIC = ("log_std_init", "vf_share_layers")
OFF_POLICY_KEYS = MODEL_KEYS - {*OF_ACTOR_CRITIC}
"""The keys of the modules of DQN, SAC and TD3; that of DQN has ``dueling`` too."""


NOT_THERE: dict[str, str] = dict.fromkeys(
    ("attention_use_n_prev_actions", "attention_use_n_prev_rewards", "lstm_use_prev_action", "lstm_use_prev_reward"),
    "the policy sees observations alone; a wrapper of the environment can put the last action and reward into them. "
    "Leave the key out",
) | dict.fromkeys(
    ("fcnet_kernel_initializer", "head_fcnet_kernel_initializer", "conv_kernel_initializer"),
    "one setting is for all layers: initializer='torch', RLlib's default, or 'orthogonal'",
)
"""Settings of RLlib without a counterpart, and the reason."""
NOT_THERE["log_std_init"] = "deviations of this algorithm's actions do not begin with a setting. Leave the key out"
NOT_THERE["vf_share_layers"] = "no value function shares layers with the policy of this algorithm. Leave the key out"


def model_faults(values: Mapping[str, Any], known: Collection[str] | None) -> list[str]:
    """The faults of ``model`` and ``model_config`` of an algorithm's settings.

    Args:
        known: keys of the module that the algorithm makes; None: they are not known before it is made.
    """
    module = values["module_class"]
    allowed = MODEL_ALLOWED if module is None else getattr(module, "allowed_settings", {})
    given = [(name, values[name]) for name in ("model", "model_config") if isinstance(values[name], Mapping)]
    found: list[str] = []
    for where, model in given:
        found += [] if known is None else unknown_keys(where, model, known)
        found += faults_of(model, allowed, prefix=f"{where} ")
    return found


def unknown_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """One text per key that a module does not know, with the nearest right one."""
    for key in given:
        if key not in known and key in NOT_THERE:
            yield f"{where} {key!r}: {NOT_THERE[key]}"
        elif key not in known:
            yield f"{where} has no key {key!r}.{did_you_mean(str(key), known)}"


def keys_of_module(module: Any) -> Collection[str] | None:
    """The keys that a module of one's own knows; None if it reads its settings in a way of its own."""
    known = getattr(module, "known_settings", None)
    reads = getattr(getattr(module, "settings", None), "__module__", "")
    return known if isinstance(known, Mapping) and reads == "rlmesh.envs.modules.rl_module" else None

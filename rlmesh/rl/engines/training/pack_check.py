"""Checks that a model gives the same results on packs as on rows alone.

A model may read the tokens beside a token's own segment (recurrent or convolutional layers, attention that cannot be
replaced), or change the output of its head (scaled or capped logits). Its packs then have wrong log-probabilities,
without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlmesh.rl.packing import Pack, pack
from rlmesh.rl.types import Episode, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Probe", "can_probe", "probe_fault", "rescaled_beyond", "static_fault", "window_of"]

LENGTHS = ((5, (6, 4)), (3, (5,)))
"""Tokens of the prompts of the probe, and of the responses to each."""
EXACT, ROUGH = 1e-2, 0.2
"""The largest difference that rounding explains in float32 and in shorter dtypes, relative to the numbers' size."""


def window_of(config: Any) -> int | None:
    """The number of tokens that layers attend to; None: all tokens."""
    window = getattr(config, "sliding_window", None)
    slides = getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None)
    return window if slides and isinstance(window, int) and window > 0 else None


def rescaled_beyond(config: Any) -> int | None:
    """The number of tokens beyond which the model rescales the positions of a whole pass (dynamic NTK, LongRoPE), so
    that a long episode changes the numbers of the short ones in its pack; None: it rescales none."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Some models have parameters for each kind of layer.
    each = [one for one in given.values() if isinstance(one, Mapping)] or [given]
    limits = []
    for one in each:
        kind = str(one.get("rope_type", one.get("type", "")))
        if "dynamic" in kind:
            limits.append(getattr(config, "max_position_embeddings", None))
        elif kind == "longrope":
            own = one.get("original_max_position_embeddings")
            limits.append(own or getattr(config, "original_max_position_embeddings", None))
    return min((one for one in limits if isinstance(one, int)), default=None)


def static_fault(config: Any) -> str | None:
    """The reason why a model cannot compute packs, as far as its configuration tells; None: there is none."""
    others = sorted({str(one) for one in getattr(config, "layer_types", None) or ()} - {"full_attention"})
    if "sliding_attention" in others:
        return "attends to a sliding window in some layers, which packs do not support yet"
    if others:
        return f"has layers of type {', '.join(others)}, which would mix the responses of a pack"
    if getattr(config, "final_logit_softcapping", None):
        return "caps its logits (final_logit_softcapping), which packs do not support yet"
    return None


def can_probe(model: nn.Module) -> bool:
    """True if the weights are whole, and have values: neither sharded over ranks nor placeholders."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    weights = [*model.parameters()]
    return bool(weights) and not any(
        isinstance(one, (DTensor, FakeTensor)) or one.device.type == "meta" or hasattr(one, "ds_id") for one in weights
    )


class Probe(NamedTuple):
    """A few episodes, and the results of a model for each of them alone.

    Attributes:
        layers: the model without its head.
        whole: the episodes as one pack.
        right: ``[targets, width]``, the hidden states from which the targets of the pack are predicted.
        ids: ``[1, tokens]``, the first episode.
        first: ``[tokens, width]``, its hidden states.
    """

    layers: Any
    whole: Pack
    right: Tensor
    ids: Tensor
    first: Tensor

    @classmethod
    def of(cls, causal: Any) -> Probe | None:
        """Compute the episodes alone, with the attention that the model has now; None: the model has no layers that are
        known.

        Args:
            causal: a model of transformers, or a value model.
        """
        head = _head_of(causal)
        layers = causal.base_model if head is not None else getattr(causal, "backbone", None)
        if layers is None:
            return None
        episodes, groups = _episodes(layers)
        whole = pack(episodes, groups=groups, token_budget=1000).by_rank[0][0]
        device = next(causal.parameters()).device
        rows = [_row(one, device) for one in episodes]
        with _evaluating(causal), torch.no_grad():
            alone = [
                layers(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state[0]
                for ids in rows
            ]
        right = torch.stack([alone[row][place - 1] for row, place in zip(whole.rows, whole.places, strict=True)])
        return cls(layers, whole, right, rows[0], alone[0])


def probe_fault(causal: Any, probe: Probe, hidden_of: Callable[[Any, Pack], Tensor]) -> str | None:
    """The difference between a small pack and its episodes alone, in words; None: there is none.

    Args:
        causal: the model of the probe, prepared for packs since.
        probe: its results with its own attention.
        hidden_of: function from the layers without head, and a pack, to the pack's last hidden states.
    """
    head = _head_of(causal)
    with _evaluating(causal), torch.no_grad():
        try:
            found = hidden_of(probe.layers, probe.whole)[torch.from_numpy(probe.whole.sources).to(probe.ids.device)]
        except torch.OutOfMemoryError:  # says nothing about the model
            raise
        except Exception as error:  # raised by the model's own layers
            return f"its layers fail on a pack: {type(error).__name__}: {error}"
        if not _same(found, probe.right):
            return "its layers give other results on a pack than on each response alone"
        if head is None:
            return None
        logits = causal(input_ids=probe.ids, attention_mask=torch.ones_like(probe.ids), use_cache=False).logits[0]
        if not _same(head(probe.first), logits):
            return "its logits are not the output of its head: they are scaled or changed otherwise"
    return None


def _head_of(causal: Any) -> Any:
    return causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None


def _episodes(layers: Any) -> tuple[list[Episode], list[int]]:
    """Episodes of tokens without a special meaning, and the number of each one's prompt."""
    config = layers.config
    named = {value for key, value in config.to_dict().items() if key.endswith("_token_id") and isinstance(value, int)}
    count = int(layers.get_input_embeddings().weight.shape[0])
    plain = [token for token in range(count) if token not in named][:64] or [0]
    at, episodes, groups = 0, [], []

    def take(length: int) -> np.ndarray[Any, Any]:
        nonlocal at
        at += length
        return np.array([plain[7 * place % len(plain)] for place in range(at - length, at)], np.int32)

    for number, (prompt, responses) in enumerate(LENGTHS):
        first = Turn.said(take(prompt))
        for length in responses:
            zeros = np.zeros(length, np.float32)
            turn = Turn(take(length), "policy", zeros, version_spans=((0, 0, length),))
            episodes.append(Episode((first, turn)))
            groups.append(number)
    return episodes, groups


def _row(episode: Episode, device: torch.device) -> Tensor:
    return torch.from_numpy(episode.ids.astype(np.int64)).to(device).unsqueeze(0)


def _same(found: Tensor, right: Tensor) -> bool:
    rough = right.dtype in (torch.float16, torch.bfloat16)
    found, right = found.double(), right.double()
    # A few numbers of real models are dozens of times as large as the others, and are rounded as much more.
    size = right.square().mean().sqrt() + right.abs()
    return bool(((found - right).abs() <= (ROUGH if rough else EXACT) * size).all())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A block in which the model is in eval mode."""
    training = [one for one in model.modules() if one.training]
    model.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True

"""`ValueModel`: the layers of a language model with a head that gives one value per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.packed import PackedInputs, packed_values
from rlmesh.rl.head.full_precision import FullPrecisionLinear
from rlmesh.rl.roles.defaults import load_float32

__all__ = ["ValueHead", "ValueModel", "value_model"]


class ValueHead(FullPrecisionLinear):
    """A linear map from hidden states ``[…, width]`` to values ``[…, 1]``, computed in float32 at least, since a lower
    precision would round values to three digits.

    A new head is 0, so the first values are 0, on every rank and for every seed.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ValueModel(nn.Module):
    """A critic: values of packs and of padded batches.

    Args:
        backbone: a model of transformers that gives hidden states, without a language-model head.
        head: from hidden states to values; ``None``: a new `ValueHead`.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        inner: Any = backbone
        self.backbone = backbone
        self.config = inner.config
        self.head = ValueHead(inner.config.hidden_size) if head is None else head
        # Engines find the layers to shard and to checkpoint by these names.
        self._no_split_modules = getattr(backbone, "_no_split_modules", None)

    def set_attn_implementation(self, name: str) -> None:
        """Choose the attention of the layers, as models of transformers do."""
        inner: Any = self.backbone
        inner.set_attn_implementation(name)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        packed: PackedInputs | None = None,
    ) -> Tensor:
        """With ``packed``, the value before each target of a pack, ``[targets]``; without, the value after each token
        of a padded batch, ``[batch, time, 1]``."""
        if packed is not None:
            # FSDP2 warns of outputs that are views.
            return packed_values(self.backbone, self.head, packed).clone()
        output: Any = self.backbone(input_ids, attention_mask, position_ids, use_cache=False)
        values: Tensor = self.head(output.last_hidden_state)
        return values.clone()


def value_model(model: str) -> ValueModel:
    """A critic from a folder or hub name, in float32 and without dropout (`load_float32`).

    A model that scores sequences or tokens with one label (a reward model, an earlier critic) keeps its head; other
    models get a new head.

    Raises:
        UsageError: the head of a model with one label is no linear map.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    named = (getattr(config, "architectures", None) or [""])[0]
    kinds: dict[str, Any] = {
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "ForTokenClassification": transformers.AutoModelForTokenClassification,
    }
    kind = next((kind for end, kind in kinds.items() if named.endswith(end)), None)
    if kind is None or config.num_labels != 1:
        loaded: Any = load_float32(transformers.AutoModelForCausalLM, model, dropout=False)
        return ValueModel(loaded.base_model)
    loaded = load_float32(kind, model, dropout=False)
    trained = getattr(loaded, "score", None) or getattr(loaded, "classifier", None)
    if not isinstance(trained, nn.Linear):
        raise UsageError(f"critic.model={model!r}: {named} has no linear head named score or classifier")
    head = ValueHead(trained.in_features)
    with torch.no_grad():
        head.weight.copy_(trained.weight)
        if trained.bias is not None:
            head.bias.copy_(trained.bias)
    return ValueModel(loaded.base_model, head)

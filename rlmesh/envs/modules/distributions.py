"""Distributions of actions: sampled in NumPy, one step at a time, and differentiated in torch, one batch at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlmesh.envs.environments.actions import action_width
from rlmesh.envs.modules.actions.composed import ChoiceActions, ProductActions, TextActions, VectorActions
from rlmesh.envs.modules.actions.plain import (
    ActionDistribution,
    CategoricalActions,
    GaussianActions,
    MultiCategoricalActions,
)
from rlmesh.errors import UsageError

__all__ = ["ActionDistribution", "CategoricalActions", "GaussianActions", "MultiCategoricalActions", "distribution_of"]

MOST_CHOICES = 65_536
"""Logits of a Box of whole numbers, all elements together; wider bounds have no sensible categorical distribution."""


def distribution_of(space: Any) -> ActionDistribution:
    """The distribution for an action space of Gymnasium.

    Box of floats: normal; Discrete, MultiDiscrete, MultiBinary and bounded Box of whole numbers: categorical; Dict and
    Tuple: independent parts; OneOf: the part, then its action; Text: the length, then the characters.

    Raises:
        UsageError: there is none for this space: Sequence, Graph, and Box of whole numbers without bounds.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return CategoricalActions(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategoricalActions(space.nvec.ravel().tolist(), space.start.ravel().tolist(), tuple(space.shape))
    if isinstance(space, spaces.MultiBinary):
        count = math.prod(space.shape)
        return MultiCategoricalActions([2] * count, [0] * count, tuple(space.shape))
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.floating):
            return GaussianActions(tuple(space.shape), space.low, space.high)
        return _whole_numbers(space)
    found: ActionDistribution = _composed(space)
    return found


def _whole_numbers(space: Any) -> ActionDistribution:
    low, high = space.low.ravel().astype(object), space.high.ravel().astype(object)  # Python's numbers do not overflow
    sizes = [int(b) - int(a) + 1 for a, b in zip(low, high, strict=True)]
    if sum(sizes) > MOST_CHOICES:
        raise UsageError(
            f"there is no distribution for the action space {space}: a Box of whole numbers is drawn as one choice per "
            f"element, and this one has {sum(sizes)} values in all, more than {MOST_CHOICES}. Narrow its bounds, or "
            "take a Box of floats and round in the environment"
        )
    return MultiCategoricalActions(sizes, [int(a) for a in low], tuple(space.shape))


def _composed(space: Any) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return ProductActions([_composed(each) for each in space.spaces.values()])
    if isinstance(space, spaces.Tuple):
        return ProductActions([_composed(each) for each in space.spaces])
    if isinstance(space, spaces.OneOf):
        return ChoiceActions([_composed(each) for each in space.spaces])
    if isinstance(space, spaces.Text):
        return TextActions(int(space.min_length), int(space.max_length), len(space.character_set))
    action_width(space)  # refuses spaces that no action can be chosen in
    return VectorActions(distribution_of(space), tuple(space.shape or ()))

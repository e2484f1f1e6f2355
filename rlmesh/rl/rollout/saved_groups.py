"""Groups as plain values for a checkpoint: numbers, texts, NumPy arrays, and lists and mappings of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rlmesh.rl.types import Abstain, Episode, Failed, Group, Outcome, Score, Turn

__all__ = ["plain_group", "whole_group"]

OUTCOMES: dict[str, type[Outcome]] = {kind.__name__: kind for kind in (Score, Abstain, Failed)}
MADE = ("turns", "outcomes")


def plain_group(group: Group) -> dict[str, Any]:
    """A group as plain values. Its row is left out, since it follows from the position."""
    return {"episodes": [_plain_episode(episode) for episode in group.episodes]}


def whole_group(plain: Mapping[str, Any], key: tuple[int, int], row: Mapping[str, Any]) -> Group:
    """The group that `plain_group` turned into plain values."""
    return Group(key, tuple(_whole_episode(one) for one in plain["episodes"]), row)


def _plain_episode(episode: Episode) -> dict[str, Any]:
    others = {one.name: getattr(episode, one.name) for one in fields(episode) if one.name not in MADE}
    outcomes = {
        name: [type(one).__name__, {part.name: getattr(one, part.name) for part in fields(one)}]
        for name, one in episode.outcomes.items()
    }
    return others | {"turns": [_plain_turn(turn) for turn in episode.turns], "outcomes": outcomes}


def _whole_episode(plain: Mapping[str, Any]) -> Episode:
    others = {name: value for name, value in plain.items() if name not in MADE}
    outcomes = {name: OUTCOMES[kind](**parts) for name, (kind, parts) in plain["outcomes"].items()}
    return Episode(tuple(_whole_turn(turn) for turn in plain["turns"]), outcomes=outcomes, **others)


def _plain_turn(turn: Turn) -> dict[str, Any]:
    return {one.name: getattr(turn, one.name) for one in fields(turn)} | {"version_spans": [*turn.version_spans]}


def _whole_turn(plain: Mapping[str, Any]) -> Turn:
    spans = tuple((int(version), int(start), int(end)) for version, start, end in plain["version_spans"])
    arrays = {
        name: None if plain[name] is None else np.asarray(plain[name], np.float32)
        for name in ("log_probs", "kept_log_mass")
    }
    return Turn(np.asarray(plain["ids"], np.int32), plain["source"], **arrays, version_spans=spans)

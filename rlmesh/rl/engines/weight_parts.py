"""The tensors of a weight source without their aliases (tied weights), all at once or in parts of limited size."""

from __future__ import annotations

from collections.abc import Iterator

from rlmesh import Manifest

__all__ = ["names_in_parts", "owned_names"]


def owned_names(manifest: Manifest) -> list[str]:
    """The names of all tensors; tied ones occur once."""
    return [spec.name for spec in manifest if spec.alias_of is None]


def names_in_parts(manifest: Manifest, most_bytes: int) -> Iterator[list[str]]:
    """The names of `owned_names` in parts of at most ``most_bytes``. A larger tensor is a part of its own."""
    names: list[str] = []
    size = 0
    for spec in (spec for spec in manifest if spec.alias_of is None):
        if names and size + spec.nbytes > most_bytes:
            yield names
            names, size = [], 0
        names.append(spec.name)
        size += spec.nbytes
    if names:
        yield names

"""`HostCopy`: a copy of trained weights in host memory, so that they can be pushed while the training engine sleeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlmesh import Manifest, WeightSource
from rlmesh.errors import UsageError
from rlmesh.rl.engines.host_memory import empty_on_host
from rlmesh.rl.engines.rollout import RolloutEngine
from rlmesh.rl.engines.weight_parts import names_in_parts

__all__ = ["HostCopy"]

BUCKET_BYTES = 256 << 20
"""Weights are gathered, and copied to an engine of this process, in parts of this size."""
FLIP_S = 60.0
"""Seconds to wait until the engine allows the change of its version."""


class HostCopy:
    """A source of a `WeightSync` that holds the weights of the last `take`.

    Args:
        source: the weights of a training engine.
    """

    lasting = False
    device = "cpu"

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._tensors: dict[str, Tensor] = {}
        self._manifest = source.manifest()
        self._taken = 0

    def take(self) -> None:
        """Copy the weights. Collective: all ranks call it, while their training engines are awake."""
        self._manifest = self._source.manifest()
        for names in names_in_parts(self._manifest, BUCKET_BYTES):
            with self._source.gather(names) as tensors:
                self._make_room({name: tensors[name] for name in names})
                for name in names:
                    self._tensors[name].copy_(tensors[name], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._taken += 1

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        kept = self._tensors
        new = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in kept or (kept[name].shape, kept[name].dtype) != (tensor.shape, tensor.dtype)
        }
        kept.update(zip(new, empty_on_host([*new.values()]), strict=True))

    # The methods of a `WeightSource`.

    def manifest(self) -> Manifest:
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        if not self._taken:
            raise UsageError("the weights were not copied yet: call take() first")
        yield {name: self._tensors[self._manifest.owner(name).name] for name in names}

    def stamp(self) -> object:
        return self._taken

    def give(self, engine: RolloutEngine, version: int) -> None:
        """Write the weights into a rollout engine of this process, which must be awake and then serves them as
        ``version``."""
        sink, gate = engine.sink, engine.gate
        gate.close(f"version {version} is being written", FLIP_S)
        gate.set_version(None, f"the write of version {version} was not completed")
        try:
            sink.begin(version)
            tied: dict[str, list[str]] = {}
            for spec in self._manifest:
                tied.setdefault(self._manifest.owner(spec.name).name, []).append(spec.name)
            for names in names_in_parts(self._manifest, BUCKET_BYTES):
                sink.stage({name: self._tensors[own] for own in names for name in tied[own]}, keep=False)
            sink.flip(version)
        except BaseException:
            sink.discard()
            gate.open()
            raise
        gate.set_version(version)
        conclude = getattr(sink, "conclude", None)
        if conclude is not None:
            conclude(version)
        gate.open()

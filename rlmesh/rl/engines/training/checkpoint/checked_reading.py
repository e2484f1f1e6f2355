"""Reads torch's distributed checkpoints without running code from them.

Torch stores a checkpoint's index (``.metadata``) as a pickle, and loads objects that are not tensors with
``torch.load``; both may run code. Here the index may contain only the few classes that describe tensors and their
files, files must be in the checkpoint's own folder, and objects are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from rlmesh.errors import UsageError

__all__ = ["CheckedReader", "TensorsOnly"]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"), (_METADATA, "MetadataIndex"), (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"), (_METADATA, "TensorProperties"), (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"), (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _Index(pickle.Unpickler):
    """Unpickles the classes that describe tensors, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's index")


class CheckedReader(FileSystemReader):
    """A checkpoint in a folder, written by torch's own writer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            UsageError: the file is no index, or refers to other folders.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            metadata = _Index(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
            for place in (metadata.storage_data or {}).values():
                if not isinstance(place, filesystem._StorageInfo) or Path(place.relative_path).name != (
                    place.relative_path
                ):
                    raise pickle.UnpicklingError(f"it names a file outside of its folder: {place!r:.80}")
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"the checkpoint in {self._folder} is not loaded: its index {path.name} is torn, or made by somebody "
                f"else: {error}"
            ) from None
        meta: StorageMeta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata


class TensorsOnly(DefaultLoadPlanner):
    """Loads objects that are not tensors with ``weights_only=True``, so that they cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The checked content is serialised again, so that torch reads exactly this content.
        checked = torch.load(value, weights_only=True)
        plain = io.BytesIO()
        torch.save(checked, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)

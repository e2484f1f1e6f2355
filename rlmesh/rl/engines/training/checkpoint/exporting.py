"""Weights as safetensors in the layout of transformers: gathered and written file by file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from rlmesh import WeightSource
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.weight_parts import names_in_parts

FILE_BYTES = 2 << 30


def write_safetensors(folder: Path, source: WeightSource, model: nn.Module, rank: int) -> None:
    """Write all weights (tied ones once), and the model's configuration if it has one.

    ``folder`` appears, or is replaced, when all files are complete. Collective; rank 0 writes, and holds the tensors of
    one file at a time.

    Raises:
        OSError: on every rank, if rank 0 could not write.
    """
    _write(folder, source, model, rank, FILE_BYTES, "model")


def write_adapter(folder: Path, source: WeightSource, model: nn.Module, rank: int) -> None:
    """Write an adapter as ``adapter_model.safetensors`` with its configuration, as peft does; see `write_safetensors`.

    Args:
        source: source of the adapter's tensors only.
        model: peft's wrapper.
    """
    _write(folder, source, model, rank, sys.maxsize, "adapter_model")


def _write(folder: Path, source: WeightSource, model: nn.Module, rank: int, file_bytes: int, stem: str) -> None:
    aside = folder.with_name(f".{folder.name}.tmp")
    fault = None
    groups = list(names_in_parts(source.manifest(), file_bytes)) or [[]]
    for index, names in enumerate(groups):
        with source.gather(names) as tensors:
            if rank == 0 and fault is None:
                fault = _attempt(lambda i=index, t=tensors: _write_file(aside, i, len(groups), t, stem))
    if rank == 0 and fault is None:
        fault = _attempt(lambda: _complete(aside, folder, groups, source.manifest(), model, stem))
    fault = ranks.from_first(fault)
    if fault is not None:
        raise OSError(f"{folder} could not be written: {fault}")


def _attempt(work: Any) -> str | None:
    try:
        work()
    except OSError as error:
        return str(error)
    return None


def _file_name(index: int, count: int, stem: str = "model") -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_file(aside: Path, index: int, count: int, tensors: Any, stem: str) -> None:
    from safetensors.torch import save_file

    if index == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700, parents=True)  # the owner may give others access later
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, aside / _file_name(index, count, stem), metadata={"format": "pt"})


def _complete(aside: Path, folder: Path, groups: list[list[str]], manifest: Any, model: nn.Module, stem: str) -> None:
    if len(groups) > 1:
        of = {name: _file_name(index, len(groups)) for index, names in enumerate(groups) for name in names}
        index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": of}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    adapters: Any = getattr(model, "peft_config", {})
    settings: list[Any]
    if stem == "model":
        settings = [getattr(model, name, None) for name in ("config", "generation_config")]
    else:
        settings = [adapters["default"]]
    for found in settings:
        if hasattr(found, "save_pretrained"):
            found.save_pretrained(aside)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    aside.replace(folder)
    shutil.rmtree(old, ignore_errors=True)

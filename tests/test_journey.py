"""docs/journey-of-a-call.md speaks of what is there: each name that looks like a function or class of ours exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "journey-of-a-call.md"
MODULES = [
    importlib.import_module(f"rlmesh.{name}")
    for name in (
        "errors", "memory.attach", "memory.device", "memory.exchange", "memory.pool", "runtime.calling.calls",
        "runtime.calling.generations", "runtime.calling.outbound", "runtime.calling.peer_connections",
        "runtime.calling.pending", "runtime.calling.retry", "runtime.calling.unretrieved",
        "runtime.connections.channel",
        "runtime.connections.inbound", "runtime.connections.shm_transfer", "runtime.future", "runtime.group",
        "runtime.handle", "runtime.serving.dispatch", "runtime.serving.executors",
        "runtime.serving.incoming", "runtime.serving.reply_backlog", "runtime.transport.stream", "wire.codec",
        "wire.envelope",
    )
]  # fmt: skip


def names() -> list[str]:
    text = re.sub(r"```.*?```", "", DOCUMENT.read_text(), flags=re.DOTALL)
    quoted = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
    # Not those that are modules, instances or words of the language: they have no capital, dot or underscore.
    return sorted({name for name in quoted if re.search(r"[A-Z]|\.|_", name) and not name.isupper()} - {"RM306"})


def find(path: str) -> object:
    if path.startswith("rlmesh."):
        where, _, what = path.rpartition(".")
        found_there: object = getattr(importlib.import_module(where), what)
        return found_there
    head, _, rest = path.partition(".")
    for module in MODULES:
        found: object = module if module.__name__.endswith(f".{head}") else getattr(module, head, None)
        for part in filter(None, rest.split(".")):
            found = getattr(found, part, None) or _annotated(found, part)
        if found is not None and not (isinstance(found, ModuleType) and rest):
            return found
    raise LookupError(f"{path} is not in the runtime any more: say in {DOCUMENT.name} what is there now")


def _annotated(owner: object, attribute: str) -> object:
    """An attribute of instances only."""
    return attribute if attribute in getattr(owner, "__slots__", ()) else None


@pytest.mark.parametrize("name", names())
def test_each_name_in_the_document_exists(name: str) -> None:
    assert find(name) is not None


def test_the_document_names_what_it_is_about() -> None:
    found = set(names())
    assert len(found) > 40
    assert {"Dispatcher.on_call", "Calls.on_reply", "Channel.flush", "Inbound.on_packet"} <= found


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(LookupError, match=r"Calls\.begin is not in the runtime"):
        find("Calls.begin")

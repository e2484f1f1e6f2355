"""The forms of ``@rpc`` and what they export."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.runtime import rpc as rpc_module
from rlmesh.runtime.rpc import exported, method_name, rpc


def stub(x: int) -> int:
    return x


@rpc
def top_level(x: int) -> int:
    return x + 1


class Forms:
    @rpc
    def bare(self) -> str:
        return "bare"

    @rpc()
    def empty(self) -> str:
        return "empty"

    @rpc(stub)
    def by_stub(self, x: int) -> int:
        return x * 2

    @rpc("by_text")
    def named(self) -> str:
        return "named"

    @rpc(concurrent=3)
    def several(self) -> None: ...

    @rpc
    @staticmethod
    def static(x: int) -> int:
        return x

    def not_exported(self) -> None: ...


class Child(Forms):
    def bare(self) -> str:
        return "overridden, and still exported"


def test_each_form_exports_under_its_name() -> None:
    methods = exported(Forms())
    assert set(methods) == {"bare", "empty", "stub", "by_text", "several", "static"}
    assert methods["bare"]() == "bare" and methods["stub"](4) == 8 and methods["static"](5) == 5
    assert stub(3) == 3, "marking by a stub must leave the stub as it was"


def test_an_overridden_method_stays_exported() -> None:
    assert exported(Child())["bare"]() == "overridden, and still exported"


def test_a_module_exports_its_top_level() -> None:
    functions = exported(sys.modules[__name__])
    assert functions["top_level"](1) == 2 and "stub" not in functions


def test_a_local_stub_is_recognized() -> None:
    def local_stub() -> None: ...

    class Role:
        @rpc(local_stub)
        def implementation(self) -> int:
            return 1

    assert list(exported(Role())) == ["local_stub"]


def test_the_name_of_what_is_called() -> None:
    assert method_name("text") == "text"
    assert method_name(stub) == "stub"
    assert method_name(Forms.by_stub) == method_name(Forms().by_stub) == "stub"
    assert method_name(Forms.named) == "by_text"
    with pytest.raises(UsageError, match="no name"):
        method_name(lambda: None)
    with pytest.raises(UsageError):
        method_name(3)


def test_export_true_exports_a_local_function_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_module, "_exported", {})

    @rpc(export=True)
    def somewhere() -> int:
        return 5

    assert somewhere() == 5
    # A local function is no top-level name, but export=True was asked for explicitly.
    assert rpc_module.exported_functions() == {"somewhere": somewhere}


@pytest.mark.parametrize("wrong", [3, "", ["x"]])
def test_wrong_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        rpc(wrong)
    with pytest.raises(UsageError, match="whole number from 1"):
        rpc(concurrent=0)


def test_two_methods_of_one_name_are_refused() -> None:
    class Twice:
        @rpc("same")
        def one(self) -> None: ...

        @rpc("same")
        def two(self) -> None: ...

    class Alias:
        @rpc
        def one(self) -> None: ...

        other = one

    with pytest.raises(UsageError, match="Twice exports two methods as 'same'; two is the second"):
        exported(Twice())
    assert list(exported(Alias())) == ["one"]

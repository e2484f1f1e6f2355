"""What a new user writes first, and another library's way of writing it: the message names the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from rlmesh import DLJobBuilder, RLJobBuilder, RoleGroup
from rlmesh.errors import JobSpecError, UsageError
from rlmesh.runtime.runtime import Runtime


def reward(prompt: str, answer: str) -> float:
    return 1.0


class Driver:
    def run(self) -> None: ...


@pytest.mark.case("n15")
def test_a_function_as_a_role_is_refused_with_the_class_to_write() -> None:
    builder = DLJobBuilder().role("REWARD").run(reward).role("DRIVER").run(Driver)
    with pytest.raises(
        JobSpecError, match=r"reward\(\) .*requires arguments \(prompt, answer\).*a class with '@rpc def reward"
    ):
        builder.build()


@pytest.mark.case("n15")
@pytest.mark.parametrize("make", [DLJobBuilder, RLJobBuilder])
@pytest.mark.parametrize("name", ["total", "per_node", "resource", "env", "mesh", "per_group", "nnodes"])
def test_a_role_that_is_described_before_it_is_defined(make: Callable[[], Any], name: str) -> None:
    for builder in (make(), make().role("W")):
        with pytest.raises(UsageError, match=rf'Say first what runs: \.role\("NAME"\)\.run\(Class\)\.{name}\(…\)'):
            getattr(builder, name)


@pytest.mark.case("n15")
def test_methods_are_named_in_call() -> None:
    with Runtime.start(bind=False) as runtime:
        handle: Any = runtime.peer("A:0", "unix:///nowhere")
        group: Any = RoleGroup("A", runtime=runtime)
        for owner in (handle, group):
            with pytest.raises(UsageError, match=r'call\("f", …\), which gives a future'):
                owner.f.remote(1)
            with pytest.raises(AttributeError, match=r'call\("method", …\)'):
                owner.remote(1)
            assert not hasattr(owner, "f") and not hasattr(owner, "__array__")
        assert copy.copy(group).role == "A"

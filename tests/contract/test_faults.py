"""Every form of a call over a network that loses, delays, doubles and reorders: it ends in time, with its own right
answer or with an error, and the next call is answered once the network is well again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import pytest

from rlmesh.errors import CallError, CallTimeout, PeerLost
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.testing import FaultPlan, InProcessCluster, VirtualLoop
from rlmesh.testing.in_process import TransportName
from tests.contract.test_forms import FORMS, Group, Member, serve

TIMEOUT_S = 3.0

PLANS: dict[str, Callable[[int], FaultPlan]] = {
    "drop": lambda seed: FaultPlan(seed=seed, drop=0.15),
    "delay": lambda seed: FaultPlan(seed=seed, delay_s=(0.0, 0.5)),
    "duplicate": lambda seed: FaultPlan(seed=seed, duplicate=0.5),
    "reorder": lambda seed: FaultPlan(seed=seed, reorder=0.5),
    "half-open": lambda seed: FaultPlan(seed=seed, half_open=0.05),
    "all": lambda seed: FaultPlan(seed=seed, drop=0.05, duplicate=0.2, reorder=0.2, delay_s=(0.0, 0.5), half_open=0.01),
}
HARMLESS = ("delay", "duplicate", "reorder")
"""Under these nothing is lost, so every call is answered; a stream whose items come out of order says so."""


async def outcomes(plan: FaultPlan) -> dict[str, Any]:
    """What became of each form, all of them on their way at once."""
    found: dict[str, Any] = {}
    async with InProcessCluster(plan=plan, network=NetworkOptions(share_memory=False)) as cluster:
        group: Group = serve(cluster).options(timeout_s=TIMEOUT_S)
        forms = {name: form for name, form in FORMS.items() if name not in ("call by stub", "call by bound method")}

        async def one(name: str) -> None:
            made = forms[name][0](group, "_async")
            found[name] = (await asyncio.gather(made, return_exceptions=True))[0]

        async def items() -> None:
            try:
                found["stream"] = [item async for item in group[0].stream("count_async", 40)]
            except CallError as error:
                found["stream"] = error

        for number in range(3):
            group.notify(Member.note_async, number)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(items())
            for name in forms:
                tasks.create_task(one(name))
                await asyncio.sleep(0.01)  # Else all of them travel in one packet.
        assert cluster.caller.activity.pending() == []
    return found


def is_honest(name: str, error: object) -> bool:
    """Errors that tell what happened; a stream knows which of its items never came, and one form collects errors."""
    if isinstance(error, list):
        return all(value is None or is_honest(name, value) for value in error)
    lost_item = name == "stream" and isinstance(error, CallError) and "was lost on its way" in str(error)
    return isinstance(error, CallTimeout | PeerLost) or lost_item


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", PLANS)
def test_every_form_ends_rightly_or_with_an_error(kind: str, seed: int) -> None:
    plan = PLANS[kind](seed)
    with VirtualLoop() as loop:
        began = loop.time()
        found = loop.run(asyncio.wait_for(outcomes(plan), 60))
        assert loop.time() - began < 20
    expected = {name: value for name, (_, value) in FORMS.items()} | {"stream": list(range(40))}
    wrong = {
        name: value
        for name, value in found.items()
        if value != expected[name] and not (is_honest(name, value) and (kind not in HARMLESS or name == "stream"))
    }
    assert wrong == {}
    assert plan.done, "the plan did nothing"


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("transport", get_args(TransportName))
def test_every_form_of_call_survives_harmless_faults_of_real_transports(kind: str, transport: TransportName) -> None:
    """The same over sockets and threads, in real time."""
    plan = FaultPlan(delay_s=(0.0, 0.02)) if kind == "delay" else PLANS[kind](0)
    with InProcessCluster(transport, plan=plan) as cluster:
        group = serve(cluster).options(timeout_s=10)
        futures = {name: form(group, "_async") for name, (form, _) in FORMS.items()}
        assert {name: future.result() for name, future in futures.items()} == {n: v for n, (_, v) in FORMS.items()}
        assert plan.done

"""An order of the master is for one incarnation of a member; the process of another one refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmesh.agent.protocol import CONTROL
from rlmesh.errors import StaleIncarnation
from tests.agent.nodes import open_node
from tests.own_time import HANG_S


@pytest.mark.case("n01")
async def test_orders_for_another_incarnation_are_refused(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        member = await node.start("Runner", incarnation=1)
        assert member.endpoint is not None
        for incarnation in (0, 2):
            control = node.runtime.peer(CONTROL, member.endpoint, incarnation=incarnation).options(timeout_s=HANG_S)
            for order in (("stop", "an order for others"), ("hold_step", "held"), ("begin_run",), ("teardown",)):
                with pytest.raises(StaleIncarnation, match="this is incarnation 1") as caught:
                    await control.call(*order)
                assert caught.value.executed == "no"
        own = node.runtime.peer(CONTROL, member.endpoint, incarnation=1).options(timeout_s=HANG_S)
        assert (await own.call("progress")).run_s is None, "it serves on"

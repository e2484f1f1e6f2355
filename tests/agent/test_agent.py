"""Real agents and real workers, with a master that only listens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rlmesh.agent.reliable_outbox import new_sender
from rlmesh.errors import CallError, PeerLost
from rlmesh.job.entry_points.entry import EntryPoint
from tests.agent.nodes import Node, is_there, open_node
from tests.agent.processes import wait_gone, wait_until
from tests.own_time import HANG_S, OwnTime


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        yield node


async def test_a_member_serves_runs_and_ends(node: Node) -> None:
    member = await node.start("Runner")
    assert await member.call("echo", [1, "two"]) == [1, "two"]
    assert await member.call("on_main_thread")
    assert await member.call("module_function", 5) == 5
    assert await node.control(member).call("begin_run") is True
    await node.master.heard("finished", "ACTOR:0")
    record = (await node.master.heard("report", "ACTOR:0"))[2]
    assert (record.step, dict(record.metrics)) == (1, {"loss": 0.5})
    assert await member.call("on_main_thread")
    await node.control(member).call("teardown")
    exit = await node.exited()
    assert (exit.exit_code, exit.signal, exit.node_rank) == (0, None, 0)
    assert exit.peak_rss_bytes > 1 << 20
    assert node.notes() == ["setup", "run", "teardown"]
    assert (await node.end()).leftovers == ()


async def test_a_worker_is_a_child_of_the_agent_in_its_own_session(node: Node) -> None:
    member = await node.start("Echo", "A_ROLE_WITH_A_LONG_NAME:11")
    facts = await member.call("facts")
    assert facts["parent"] == node.info.agent_pid
    assert facts["session"] == facts["pid"]
    assert facts["comm"] == "A_ROLE_WITH_:11"
    assert facts["input"] == "/dev/null"
    assert facts["output"].endswith("logs/A_ROLE_WITH_A_LONG_NAME-11.log")
    assert facts["config"] == {"lr": 0.1}
    assert not {"torch", "numpy", "pydantic"} & set(facts["modules"]) - {"pydantic"}


async def test_early_calls_wait_for_setup_and_death_is_told_at_once(node: Node, own_time: OwnTime) -> None:
    await node.spawn(node.spec("SlowSetup"))
    member = node.member(await node.bound("ACTOR:0"))
    assert (await member.call("notes")).split("\n")[:2] == ["setup", "setup is over"]
    assert await member.call("on_main_thread")
    await member.call("say", "last words\nand half a line")
    pid = (await member.call("facts"))["pid"]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _, _, exit, told = await node.master.heard("exited", "ACTOR:0")
    assert (exit.signal, exit.exit_code, exit.pid) == (9, None, pid)
    assert exit.last_log_lines == ("last words", "and half a line")
    assert own_time.of(told - killed) < 0.25  # 0.05 on a quiet machine
    with pytest.raises(PeerLost):
        await member.call("echo", 1)


ERRORS = {
    "FailsInInit": "OwnError: no model",
    "FailsInSetup": "ValueError: no data",
    "Missing": "UsageError: module 'tests.agent.roles'",
    "FailsInRun": "KeyError: 'loss'",
    "FailsInTeardown": "OSError: disk full",
}


async def test_what_user_code_raises_is_told_and_logged(node: Node) -> None:
    names = {role: f"ACTOR:{rank}" for rank, role in enumerate(ERRORS)}
    await node.spawn(*(node.spec(role, name) for role, name in names.items()))
    for name in names.values():
        await node.bound(name)
    for role, order in (("FailsInRun", "begin_run"), ("FailsInTeardown", "teardown")):
        await node.master.heard("ready", names[role])
        hello = (await node.master.heard("bound", names[role]))[2]
        await node.control(hello).call(order)
    for role, error in ERRORS.items():
        _, _, raised, text = await node.master.heard("failed", names[role])
        assert f"{type(raised).__name__}: {raised}".startswith(error)
        assert "Traceback" in text and error.split(":")[0] in text
        exit = await node.exited(names[role])
        assert exit.exit_code == 1
        assert error in node.log(names[role])
        assert error in "\n".join(exit.last_log_lines)


async def test_sys_exit_ends_the_process_with_its_code(node: Node) -> None:
    five, other = node.spec("ExitsInRun", "ACTOR:5"), node.spec("ExitsInRun", "ACTOR:0")
    await node.spawn(five, other)
    for name in ("ACTOR:5", "ACTOR:0"):
        hello = await node.bound(name)
        await node.master.heard("ready", name)
        await node.control(hello).call("begin_run")
    assert (await node.exited("ACTOR:5")).exit_code == 5
    await node.master.heard("finished", "ACTOR:0")  # sys.exit(0) in run() is a return
    member = node.member((await node.master.heard("bound", "ACTOR:0"))[2])
    with pytest.raises(CallError, match="SystemExit"):
        await member.call("leave", 4)
    assert (await node.exited("ACTOR:0")).exit_code == 4
    assert not [said for said in node.master.said if said[0] == "failed"]


async def test_two_processes_with_one_number_are_two_senders(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of a node and of its replacement, each in a container; a master takes no report of a sender twice."""
    name = f"agent:{node.info.node_rank}"
    sender = node.master.senders[name]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: node.info.agent_pid)
        other = new_sender(name)
    assert sender.startswith(f"{name}/{node.info.agent_pid}") and len(sender) == len(other)
    assert sender != other


async def test_an_order_whose_answer_was_lost_starts_no_member_twice(node: Node) -> None:
    orders = [node.spec("ExitsInRun", "ACTOR:5"), node.spec("Echo", "ACTOR:0")]
    pids = await node.spawn(*orders)
    hello = await node.bound("ACTOR:5")
    await node.bound("ACTOR:0")
    await node.master.heard("ready", "ACTOR:5")
    assert await node.spawn(*orders) == pids  # while they run
    await node.control(hello).call("begin_run")
    await node.exited("ACTOR:5")
    assert await node.spawn(*orders) == pids  # after one of them has ended
    (again,) = await node.spawn(node.spec("Echo", "ACTOR:5", incarnation=1))
    assert again not in pids
    bound = [said[2].pid for said in node.master.said if said[0] == "bound"]
    assert sorted(bound) in (sorted(pids), sorted((*pids, again)))


async def begun(node: Node, name: str) -> None:
    """``run()`` is entered some time after it was asked for."""
    await asyncio.to_thread(wait_until, lambda: "run" in node.notes(name))


async def test_sigterm_stops_every_member_and_kills_the_deaf_after_the_grace(node: Node, own_time: OwnTime) -> None:
    roles = ("Looper", "Stubborn", "DeafToAll", "Echo")
    names = {role: f"ACTOR:{rank}" for rank, role in enumerate(roles)}
    await node.spawn(*(node.spec(role, name) for role, name in names.items()))
    for name in names.values():
        hello = await node.bound(name)
        await node.master.heard("ready", name)
        assert await node.control(hello).call("begin_run") is (name != names["Echo"])
        if name != names["Echo"]:
            await begun(node, name)
        assert await node.member(hello).call("echo", 1) == 1  # also while run() has the main thread
        if name == names["Stubborn"]:
            (found,) = await node.agent.call("examine", (("ACTOR", 1, 0),), (("ACTOR", 1, 0),))
            assert "roles.py" in found.text
    began = time.monotonic()
    await node.agent.call("stop_members", (*(("ACTOR", rank, 0) for rank in range(4)), ("GONE", 1, 0)), 1.0)
    assert time.monotonic() - began > 0.9 and own_time.since(began) < 2.5
    ends = {role: (await node.exited(name)).signal for role, name in names.items()}
    assert ends == dict.fromkeys(roles, signal.SIGTERM) | {"DeafToAll": signal.SIGKILL}
    assert node.notes(names["Looper"]) == ["setup", "run", "stopped: SIGTERM", "teardown"]
    assert node.notes(names["Stubborn"]) == ["setup", "run", "teardown"]
    assert node.notes(names["Echo"]) == ["setup", "teardown"]
    assert node.notes(names["DeafToAll"]) == ["setup", "run"]


async def test_one_sigterm_is_enough_and_a_hanging_end_is_bounded(node: Node) -> None:
    stubborn = await node.start("Stubborn", "A:0", grace_s=0.3)
    hangs = await node.start("Hangs", "B:0", grace_s=0.3)
    await node.control(stubborn).call("begin_run")
    await begun(node, "A:0")
    os.kill((await stubborn.call("facts"))["pid"], signal.SIGTERM)
    await node.control(hangs).call("teardown")
    assert (await node.exited("A:0")).signal == signal.SIGTERM
    assert node.notes("A:0") == ["setup", "run", "teardown"]
    assert (await node.exited("B:0")).exit_code == 0
    assert "did not end within 0.3 s" in node.log("B:0")


async def test_a_daemon_of_a_dead_member_is_ended_and_reported(node: Node) -> None:
    member = await node.start("Echo")
    daemon = await member.call("daemon")
    os.kill((await member.call("facts"))["pid"], signal.SIGSEGV)
    exit = await node.exited()
    assert exit.signal == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in "\n".join(exit.last_log_lines)
    assert wait_gone([daemon], HANG_S) == []
    report = await node.end()
    assert [f"pid {daemon} (sleep) left by ACTOR:0:0"] == [item.what for item in report.leftovers]
    assert report.clean


@pytest.mark.parametrize("how", ["kill", pytest.param("exit", marks=pytest.mark.slow)])
async def test_shared_memory_of_a_dead_member_goes_while_the_job_lives_on(node: Node, how: str) -> None:
    """Whatever the way; what others hold of it stays readable, and other members keep theirs."""
    first, second = await node.start("Echo", "ACTOR:0"), await node.start("Echo", "ACTOR:1")
    pid = (await first.call("facts"))["pid"]
    array, _ = await first.call("large", 8 << 20), await second.call("large", 8 << 20)

    def segments(name: str) -> list[Path]:
        return list(Path("/dev/shm").glob(f"rlmesh-{node.config.job_id}-n0-{name}-*"))

    assert segments("ACTOR.0") and segments("ACTOR.1")
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        with pytest.raises(CallError):
            await first.call("leave", 3)
    await node.exited("ACTOR:0")
    # The agent does it on a thread, after it has told of the death.
    await asyncio.to_thread(wait_until, lambda: segments("ACTOR.0") == [])
    assert segments("ACTOR.1")
    assert not array.any() and len(array) == 8 << 20
    assert await second.call("echo", 1) == 1


async def test_functions_and_scripts_are_their_own_run(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(0)\n")
    await node.start("function_entry", "A:0")
    await node.start(EntryPoint("script", script=str(script), args=("--lr", "1")), "B:0")
    for name in ("A:0", "B:0"):
        assert await node.control((await node.master.heard("bound", name))[2]).call("begin_run") is True
        await node.master.heard("finished", name)
    assert (await node.master.heard("report", "A:0"))[2].step == 7
    assert node.log("B:0") == "__main__ ['--lr', '1']\n"


async def test_a_class_of_the_submitters_script_is_its_main_module_at_members(node: Node, tmp_path: Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        "import __main__, pickle\n"
        "from rlmesh import rpc\n"
        "class Config: lr = 3\n"
        "class Actor:\n"
        "    @rpc\n"
        "    def who(self): return __name__, pickle.loads(pickle.dumps(Config())).lr, __main__.Actor is Actor\n"
        "if __name__ == '__main__': raise SystemExit('the job was submitted again')\n"
    )
    member = await node.start(EntryPoint("class", "__main__", "Actor"), main_path=str(main))
    assert await member.call("who") == ("__mp_main__", 3, True)


async def test_killed_agent_takes_all_with_it(node: Node, own_time: OwnTime) -> None:
    member = await node.start("Echo")
    daemon = await member.call("daemon")
    pid = (await member.call("facts"))["pid"]
    began = time.monotonic()
    os.kill(node.info.agent_pid, signal.SIGKILL)
    report = await node.end()
    assert wait_gone([pid, daemon, node.info.agent_pid], 0) == []
    assert own_time.since(began) < 5.0
    assert report.agent_code == -9
    assert f"pid {daemon} (sleep)" in [item.what for item in report.leftovers]


async def test_killed_guardian_is_stood_in_for_by_the_agent(node: Node) -> None:
    member = await node.start("Echo")
    daemon = await member.call("daemon")
    pid = (await member.call("facts"))["pid"]
    os.kill(node.guardian.pid, signal.SIGKILL)
    assert wait_gone([pid, daemon, node.info.agent_pid], HANG_S) == []
    assert not is_there(node.config.socket_dir)
    report = await node.end()
    assert not report.clean and report.leftovers[0].kind == "unproven"
    (Path(node.config.run_dir) / "exit-node0.json").write_text('{"node_rank": 0}')
    node.report = type(report)(0, 0)


async def test_the_end_reports_that_nothing_is_left(node: Node) -> None:
    await node.start("Echo", "A:0")
    await node.start("Echo", "B:0")
    report = await node.end()
    assert (report.leftovers, report.processes_started, report.agent_code) == ((), 3, 0)
    assert not [said for said in node.master.said if said[0] == "exited"], "it ends as a whole, and is told as such"


async def test_a_node_tells_what_it_offers_and_reserves_ports(node: Node) -> None:
    port = await node.agent.call("reserve_port")
    assert port != await node.agent.call("reserve_port")
    for address in ("127.0.0.1", "127.0.0.2", ""):
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind((address, port))
    with socket.socket() as server, socket.create_server(("", 0)):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass
    info = node.info
    assert info.cpus >= 1 and info.memory_bytes > 1 << 30
    assert [device.index for device in info.devices] == [0, 1]
    assert {device.kind for device in info.devices} == {"virtual"}
    assert info.name == "node0" and info.hostname == os.uname().nodename

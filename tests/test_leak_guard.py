"""The leak guard itself: tests that leak must fail, and say what they left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = """
import asyncio, os, pathlib, subprocess, sys, threading, time, socket
import pytest
kept = []
"""


def run_nested(directory: Path, body: str, grace_s: float) -> subprocess.CompletedProcess[str]:
    options = ["asyncio_mode=auto", "filterwarnings=ignore", f"leak_grace_s={grace_s}"]
    (directory / "test_nested.py").write_text(PRELUDE + body)
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q",
            *(word for option in options for word in ("-o", option)), "--rootdir", str(directory),
            "test_nested.py",
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip


LEAKS = {
    "thread": (
        "threading.Thread(target=time.sleep, args=(30,), name='forgotten', daemon=True).start()",
        "thread            'forgotten', now ",
    ),
    "descriptor": ("kept.append(socket.socket())", "descriptor        "),
    "child": ("kept.append(subprocess.Popen(['sleep', '30']))", "sleep 30"),
    "zombie": ("kept.append(subprocess.Popen(['true']))", "[Z, child of "),
    "orphan": (
        # Until it is what it becomes: while a program is loaded its environment cannot be read.
        "subprocess.run(['sh', '-c', 'setsid sleep 31 > /dev/null 2>&1 & "
        "until grep -q sleep /proc/$!/comm; do :; done'], check=True)",
        "sleep 31",
    ),
    "segment": ("pathlib.Path('/dev/shm/rlmesh-guard-test').touch()", "/dev/shm/rlmesh-guard-test"),
    "socket directory": ("(pathlib.Path(os.environ['XDG_RUNTIME_DIR']) / 'rlmesh-x').mkdir()", "rlmesh-x"),
    "context": ("import zmq; c = zmq.Context(); s = c.socket(zmq.PAIR); s.close(); kept.append(c)", "ZMQbg"),
}


@pytest.fixture(scope="module")
def leaking_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One nested session with all the leaks, since each costs its grace."""
    body = "\n".join(
        f"def test_{kind.replace(' ', '_')}() -> None:\n    {statement}\n" for kind, (statement, _) in LEAKS.items()
    )
    body += """
async def test_task() -> None:
    async def forgotten() -> None:
        await asyncio.sleep(30)
    kept.append(asyncio.get_running_loop().create_task(forgotten()))
"""
    try:
        return run_nested(tmp_path_factory.mktemp("nested"), body, grace_s=0.2).stdout
    finally:
        Path("/dev/shm/rlmesh-guard-test").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaks_fails_and_says_what(leaking_run: str, kind: str) -> None:
    if kind == "segment" and any(name.startswith("rlmesh-") for name in os.listdir("/dev/shm")):
        pytest.skip("somebody else on this machine has segments: none is laid to a test")
    section = leaking_run.split(f"ERROR at teardown of test_{kind.replace(' ', '_')} _", 1)
    assert len(section) == 2, leaking_run
    assert LEAKS[kind][1] in section[1].split("ERROR at teardown", 1)[0]


def test_a_task_that_is_left_fails_its_test(leaking_run: str) -> None:
    assert "forgotten()" in leaking_run.split("ERROR at teardown of test_task _", 1)[1]


def test_leaked_processes_are_ended(leaking_run: str) -> None:
    commands = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert leaking_run
    assert not any(b"sleep\x0031\x00" in read(command) for command in commands)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_ends_within_the_grace_is_no_leak(tmp_path: Path) -> None:
    body = """
def test_thread_that_ends() -> None:
    threading.Thread(target=time.sleep, args=(0.3,)).start()

def test_child_that_is_waited_for() -> None:
    child = subprocess.Popen(["sleep", "0.3"])
    threading.Thread(target=child.wait).start()

def test_tidy() -> None:
    subprocess.run(["true"], check=True)
    with socket.socket():
        pass

async def test_task_that_ends() -> None:
    kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(0.2)))

@pytest.fixture
async def server():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    yield server
    server.close()
    await server.wait_closed()

async def test_fixture_that_cleans_up(server) -> None:
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close()
    await writer.wait_closed()
"""
    result = run_nested(tmp_path, body, grace_s=5)
    assert result.returncode == 0, result.stdout
    assert "5 passed" in result.stdout

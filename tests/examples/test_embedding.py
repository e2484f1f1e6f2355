"""The embedding example over HTTP: a service that joins a running job, serves from it, and leaves it as it was."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from rlmesh.errors import AuthenticationFailed, PeerLost, UsageError  # noqa: E402
from rlmesh.run_directory.discovery import RunningJob, running_jobs  # noqa: E402
from rlmesh.runtime.connections.security import write_key_file  # noqa: E402
from rlmesh.runtime.default_runtime import default_runtime_or_none  # noqa: E402
from rlmesh.runtime.rpc import rpc  # noqa: E402
from rlmesh.runtime.runtime import Runtime  # noqa: E402
from tests.examples.conftest import EXAMPLES  # noqa: E402
from tests.master.launched import Launched  # noqa: E402

FOLDER = EXAMPLES / "embedding"
PROMPT = {"prompt": "the trainer", "words": 8, "seed": 3}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningJob]:
    """The example's job, in processes of its own."""
    argv = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", str(FOLDER / "job.py"), "--", "--step_s", "0.1"]
    with Launched(argv, tmp_path_factory.mktemp("embedding")) as launched:
        launched.wait_for(r"step \d")  # Which steps are shown depends on the machine's speed.
        (found,) = [each for each in running_jobs() if each.job_name == "embedding"]
        yield found
        os.killpg(launched.process.pid, signal.SIGINT)
        launched.ended()


def key_file(job: RunningJob) -> str:
    return str(job.folder / "key")


@pytest.fixture
def service() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from embedding import service

        yield service
    finally:
        sys.path.remove(str(EXAMPLES))


class Footprint:
    """What of the process belongs to the service, and must be as it was."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.parts: dict[str, Any] = {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "native threads": len(os.listdir("/proc/self/task")),
            "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "wake-up descriptor": (fd := signal.set_wakeup_fd(-1), signal.set_wakeup_fd(fd))[0],
            "exception handler": loop.get_exception_handler(),
            "task factory": loop.get_task_factory(),
            "executor": getattr(loop, "_default_executor", None),
            "policy": asyncio.get_event_loop_policy(),
            "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
            "tracing": (sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()),
            "root logger": (logging.root.level, tuple(logging.root.handlers)),
            "warnings": tuple(warnings.filters),
            "exit handlers": atexit._ncallbacks(),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": (mask := os.umask(0), os.umask(mask))[0],
            "default runtime": default_runtime_or_none(),
        }

    def changed(self) -> dict[str, Any]:
        """What is different now."""
        return {name: (self.parts[name], now) for name, now in Footprint().parts.items() if now != self.parts[name]}


async def test_the_service_serves_and_rlmesh_leaves_no_trace_in_it(job: RunningJob, service: Any) -> None:
    before = Footprint()
    app = service.make_app(job.master_endpoint, key_file(job))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert before.changed() == {}, "joined"
        assert (await client.get("/health")).json() == {"rollout_members": 2}
        answers = await asyncio.gather(*(client.post("/generate", json=PROMPT) for _ in range(40)))
        assert [answer.status_code for answer in answers] == [200] * 40, answers[0].text
        made = [answer.json() for answer in answers]
        assert {each["rank"] for each in made} == {0, 1}, "both members served"
        assert {each["text"] for each in made} == {made[0]["text"]} and made[0]["text"].startswith("the trainer ")
        assert before.changed() == {}, "served"
        version = max(each["policy_version"] for each in made)
        async with asyncio.timeout(20):  # The job goes on under the service.
            while (await client.post("/generate", json=PROMPT)).json()["policy_version"] <= version:
                pass
        assert (await client.post("/generate", content=b"no json")).status_code == 400
        assert (await client.post("/generate", json={"prompt": "x", "words": 0})).status_code == 400
        assert (await client.get("/generate")).status_code == 405
    assert before.changed() == {}, "left"
    assert [each.job_id for each in running_jobs() if each.job_name == "embedding"] == [job.job_id], "the job goes on"


async def test_two_runtimes_share_a_loop_and_each_serves(job: RunningJob) -> None:
    class Desk:
        @rpc
        async def ask(self, question: str) -> str:
            return question.upper()

    before = Footprint()
    async with (
        Runtime.join(job.master_endpoint, key_file(job), name="one", bind="tcp://127.0.0.1:*") as one,
        Runtime.join(job.master_endpoint, key_file(job), name="two") as two,
    ):
        one.serve("DESK:0", Desk())
        assert await two.peer("DESK:0", one.endpoint or "").call("ask", "why") == "WHY"
        assert set(one.address_book().roles()) == {"ROLLOUT", "TRAINER"} == set(two.address_book().roles())
        changed = before.changed()
        # ZeroMQ's own threads, since this one chose TCP; none of Python's.
        assert changed.keys() == {"native threads"}, changed
    assert before.changed() == {}


def test_a_real_server_answers_with_what_a_member_says(job: RunningJob, tmp_path: Path) -> None:
    argv = [str(FOLDER / "service.py"), "--address", job.master_endpoint, "--key-file", key_file(job), "--port", "0"]
    with Launched(argv, tmp_path) as server:
        url = server.wait_for(r"running on (http://127\.0\.0\.1:\d+)").group(1)
        for _ in range(3):
            answer = httpx.post(f"{url}/generate", json=PROMPT, timeout=10)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"].startswith("the trainer ")
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in server.output


async def test_who_cannot_join_is_told_why(job: RunningJob, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_key_file(other)
    with pytest.raises(AuthenticationFailed, match="does not hold the key of this job"):
        async with Runtime.join(job.master_endpoint, other):
            pass
    with pytest.raises(PeerLost, match=r"no job answers at unix:///.*`rlmesh ps JOB` shows the address"):
        async with Runtime.join(f"unix://{tmp_path}/nobody", other, timeout_s=0.3):
            pass
    other.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        async with Runtime.join(job.master_endpoint, other):
            pass
    with pytest.raises(UsageError, match="is no address"):
        async with Runtime.join(str(tmp_path), key_file(job)):
            pass


def test_a_service_that_is_killed_disturbs_nobody(job: RunningJob, tmp_path: Path) -> None:
    argv = [str(FOLDER / "service.py"), "--address", job.master_endpoint, "--key-file", key_file(job), "--port", "0"]
    with Launched(argv, tmp_path) as server:
        url = server.wait_for(r"running on (http://127\.0\.0\.1:\d+)").group(1)
        assert httpx.post(f"{url}/generate", json=PROMPT, timeout=10).status_code == 200
        os.killpg(server.process.pid, signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL

    async def ask() -> int:
        async with Runtime.join(job.master_endpoint, key_file(job)) as runtime:
            from rlmesh import RoleGroup

            return len(await RoleGroup[Any]("ROLLOUT", runtime=runtime).call("generate", "the", 3))

    assert asyncio.run(ask()) == 2
    assert subprocess.run(["ls", job.folder], capture_output=True, check=True).stdout

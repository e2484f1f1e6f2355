"""Jobs whose roles only serve calls: whoever started them drives them, from a loop or from plain threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlmesh import DLJob, DLJobBuilder, RoleGroup, Runtime
from rlmesh.driver.handle import JobHandle
from rlmesh.errors import JobFailed, JobSpecError, JobStopped, PeerLost, UsageError
from rlmesh.testing import LocalCluster
from tests.job import serving
from tests.job.test_handle import FakeDriver, handle_of
from tests.own_time import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def job_of(cls: type, total: int = 2) -> DLJob:
    return DLJobBuilder().role("ECHO").run(cls).total(total).restart("never").build()


def echo(runtime: Runtime) -> RoleGroup[serving.Fragile]:
    return RoleGroup("ECHO", runtime=runtime)


@pytest.mark.case("n07")
async def test_a_serving_job_lives_until_the_block_is_left(tmp_path: Path) -> None:
    with LocalCluster(devices_per_node=2, run_root=tmp_path):
        async with job_of(serving.Echo).start("serves") as handle, handle.join() as runtime:
            assert await echo(runtime).call("echo", "one") == ["ECHO:0 one", "ECHO:1 one"]
            while handle.status.stage != "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # As long as it took the job to end where nobody drove it.
            assert await echo(runtime).call("echo", "two") == ["ECHO:0 two", "ECHO:1 two"]
            assert (handle.done(), handle.status.failures) == (False, ())
        assert handle.done() and handle.status.failures == ()


@pytest.mark.case("n07")
@pytest.mark.parametrize("ask", [JobHandle.stop, JobHandle.notice])
def test_a_serving_job_lives_until_it_is_stopped(tmp_path: Path, ask: object) -> None:
    with LocalCluster(devices_per_node=2, run_root=tmp_path):
        handle = job_of(serving.Echo).submit("serves", blocking=False)
        assert isinstance(handle, JobHandle)
        with handle.join() as runtime:
            assert echo(runtime).call("echo", "one").result(HANG_S) == ["ECHO:0 one", "ECHO:1 one"]
            pending = echo(runtime)[0].options(timeout_s=HANG_S)
            ask(handle, "enough")  # type: ignore[operator]
            with pytest.raises((JobFailed, JobStopped), match="enough"):
                handle.result(HANG_S)
            with pytest.raises(PeerLost, match="job serves "):
                pending.call("echo", "two").result(HANG_S)


@pytest.mark.case("n07")
async def test_pending_calls_and_the_block_say_why_it_failed(tmp_path: Path) -> None:
    at_the_end = pytest.raises(JobFailed, match="job fragile failed: ECHO:1")
    with LocalCluster(devices_per_node=2, run_root=tmp_path), at_the_end:
        async with job_of(serving.Fragile).start("fragile") as handle:
            with pytest.raises(JobFailed, match=r"job fragile failed: ECHO:1 .*exited with code 7") as caught:
                async with handle.join() as runtime:
                    assert await echo(runtime).call("echo", "one") == ["ECHO:0 one", "ECHO:1 one"]
                    waiting = echo(runtime)[0].call("forever")
                    with pytest.raises(PeerLost):
                        await echo(runtime)[1].call("die")
                    error = await asyncio.to_thread(waiting.exception, HANG_S)
                    assert isinstance(error, PeerLost)
                    assert "job fragile failed: ECHO:1" in str(error), "and not that a connection was closed"
                    await echo(runtime)[0].call("echo", "two")
            assert isinstance(caught.value.__cause__, PeerLost)
            with pytest.raises(JobFailed, match="job fragile failed: ECHO:1"):
                async with handle.join():
                    pass
            raised = pytest.raises(JobFailed, match="job fragile failed: ECHO:1")
            with raised:
                await handle


@pytest.mark.case("n17")
def test_plain_threads_start_a_job_and_call_its_roles(tmp_path: Path) -> None:
    with LocalCluster(devices_per_node=2, run_root=tmp_path):
        with job_of(serving.Echo).start("plain") as handle, handle.join() as runtime:
            group = echo(runtime)
            assert group.call("echo", "main").result(HANG_S) == ["ECHO:0 main", "ECHO:1 main"]
            with ThreadPoolExecutor(4) as pool:
                said = list(pool.map(lambda i: group[i % 2].call("echo", str(i)).result(HANG_S), range(40)))
            assert said == [f"ECHO:{i % 2} {i}" for i in range(40)]
            address, key = handle.address_and_key() or ("", b"")
            with Runtime.join(address, key=key, name="other") as other:
                assert echo(other)[1].call("echo", "x").result(HANG_S) == "ECHO:1 x"
        assert handle.done()
        assert not [thread for thread in threading.enumerate() if "service" in thread.name]


@pytest.mark.case("n17")
def test_the_plain_block_says_why_the_job_failed(tmp_path: Path) -> None:
    with LocalCluster(devices_per_node=2, run_root=tmp_path):
        told = pytest.raises(JobFailed, match=r"job fragile failed: ECHO:1")
        with told, job_of(serving.Fragile).start("fragile") as handle, handle.join() as runtime:
            waiting = echo(runtime)[0].call("forever")
            echo(runtime)[1].call("die").exception(HANG_S)
            waiting.result(HANG_S)
        with pytest.raises(JobFailed, match="job fragile failed"):
            handle.join().__enter__()


@pytest.mark.case("n17")
def test_a_script_without_asyncio_starts_joins_and_calls(tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        "from rlmesh import DLJobBuilder, RoleGroup, rpc\n\n\n"
        "class Echo:\n    @rpc\n    def say(self, text):\n        return text\n\n\n"
        "if __name__ == '__main__':\n"
        "    job = DLJobBuilder().role('ECHO').run(Echo).total(2).resource(cpu=1).build()\n"
        "    with job.start('plain', view='none') as handle, handle.join() as runtime:\n"
        "        print(RoleGroup('ECHO', runtime=runtime).call('say', 'hello').result())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, text=True,
        capture_output=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['hello', 'hello']" in done.stdout


@pytest.mark.case("n17")
async def test_a_plain_block_does_not_block_a_loop() -> None:
    driver = FakeDriver()
    handle = handle_of(driver)
    for block, instead in ((handle, r"async with job\.start\(\)"), (handle.join(), r"async with handle\.join\(\)")):
        with pytest.raises(UsageError, match=instead), block:
            pass
    with (
        pytest.raises(UsageError, match=r"async with Runtime\.join\(\)"),
        Runtime.join("unix:///nowhere", key=b"k" * 32),
    ):
        pass
    driver.go_on.set()
    await handle


@pytest.mark.case("n17")
def test_leaving_a_plain_block_ends_the_job() -> None:
    driver = FakeDriver()
    with handle_of(driver) as handle:
        assert not handle.done()
    assert handle.done() and driver.reasons == ["the block of start() was left"]
    with pytest.raises(TimeoutError, match="had no members after"):
        driver = FakeDriver()
        driver.address_and_key = None  # type: ignore[attr-defined]
        with handle_of(driver) as handle, handle.join(timeout_s=0.1):
            pass


@pytest.mark.case("n07")
def test_submit_names_start_for_a_job_that_only_serves() -> None:
    with pytest.raises(JobSpecError, match=r"start\(\), as in 'with job\.start\(\) as handle, handle\.join\(\)"):
        job_of(serving.Echo).submit("serves")

"""A job on one machine cannot be reached from another: nothing of it listens beyond loopback."""

from __future__ import annotations

import os
import time
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from rlmesh.testing import LocalCluster
from tests.master import toy_job


@pytest.mark.case("O7")
@pytest.mark.parametrize("transport", ["unix", "zmq"])
def test_a_job_listens_on_unix_sockets_only(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMESH_TRANSPORT", transport)
    with LocalCluster(run_root=tmp_path):
        job = toy_job.build(sleep=30).submit("reach", blocking=False)
        end = time.monotonic() + 30
        while job.status.stage != "running" and time.monotonic() < end:
            time.sleep(0.05)
        processes = psutil.Process(os.getpid()).children(recursive=True)
        assert len(processes) >= 6, "guardian, agent, master, zygote and members"
        listening = [
            connection.laddr
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert [address for address in listening if not ip_address(address.ip).is_loopback] == []
        sockets = [c.laddr for p in processes for c in p.net_connections("unix") if "/rlm-" in str(c.laddr)]
        assert len(set(sockets)) >= 4
        for path in set(map(str, sockets)):
            assert os.stat(Path(path).parent).st_mode & 0o077 == 0
        job.stop()

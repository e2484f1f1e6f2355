"""A /dev/shm that is too small or full: a clear result, never a bus error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

IN_A_NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
MOUNT = "mount -t tmpfs -o size=16m tmpfs /dev/shm"


def _may_mount() -> bool:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    return subprocess.run([*IN_A_NAMESPACE, MOUNT], capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="no mount namespace of one's own here")
def test_a_shm_that_is_too_small_or_full_is_told_and_bytes_travel() -> None:
    script = f'{MOUNT} && exec "$0" -m tests.memory.small_shm'
    done = subprocess.run([*IN_A_NAMESPACE, script, sys.executable], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["size_mib"] == 16
    assert "no room for 32.0 MiB of shared memory: /dev/shm has 16 of 16 MiB free" in found["asked_before"]
    assert "32.0 MiB of shared memory could not be reserved in /dev/shm: No space left" in found["refused"]
    assert found["left_behind"] == []
    assert found["captured_as"] == ["bytes", "memoryview"]
    assert found["contents"] == [True, True]
    assert "messages go as plain bytes" in done.stderr.decode()
    assert "No space left" in found["full"]
    assert found["in_full"] == [3, True, True]
    assert "no room for 4.0 MiB" in found["full_refused"]

"""Room that is left, names of segments, what comes over the wire."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmesh.errors import MalformedFrame
from rlmesh.memory.layout import (
    Descriptor,
    SlotRelease,
    owner_name,
    place,
    remove_segments,
    remove_segments_of_process,
    segment_prefix,
)
from rlmesh.memory.room import room_in

MIB = 1 << 20


def _machine(root: Path, available_mib: int) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {64 << 30 >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available_mib << 10} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text("")
    return root


def _group(folder: Path, limit: str, used: int, droppable: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 5\n{names[2]} {droppable}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_file_system_limits(tmp_path: Path) -> None:
    room = room_in("/dev/shm", tmp_path)  # neither proc nor sys
    system = os.statvfs("/dev/shm")
    assert 0 <= room.bytes < system.f_bavail * system.f_frsize
    assert "/dev/shm has" in room.limited_by and "--shm-size" in room.limited_by


def test_the_machine_limits(tmp_path: Path) -> None:
    room = room_in("/dev/shm", _machine(tmp_path, 4200))
    assert room.bytes == (4200 - 4096) * MIB  # a sixteenth of 64 GiB is left alone
    assert "4200 MiB of memory available" in room.limited_by
    assert room_in("/dev/shm", _machine(tmp_path / "less", 100)).bytes == 0


def test_a_control_group_limits_with_what_is_above_it(tmp_path: Path) -> None:
    root = _machine(tmp_path, 32768)
    (root / "proc/self/cgroup").write_text("0::/job/worker\n")
    groups = root / "sys/fs/cgroup"
    _group(groups / "job/worker", "max", 10 * MIB, 0, V2)
    _group(groups / "job", str(160 * MIB), 100 * MIB, 30 * MIB, V2)
    room = room_in("/dev/shm", root)
    assert room.bytes == (160 - 70 - 10) * MIB
    assert "memory limit of 160 MiB" in room.limited_by


def test_a_control_group_of_the_first_version_that_only_the_host_sees(tmp_path: Path) -> None:
    root = _machine(tmp_path, 32768)
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/x\n7:memory:/docker/abc\n")
    _group(root / "sys/fs/cgroup/memory", str(320 * MIB), 100 * MIB, 0, V1)
    assert room_in("/dev/shm", root).bytes == (320 - 100 - 20) * MIB
    _group(root / "sys/fs/cgroup/memory", str(1 << 63), 100 * MIB, 0, V1)
    assert room_in("/dev/shm", root).bytes > 320 * MIB


@pytest.mark.parametrize("text", ["a/b", "..//x", "a b", "x" * 101, "\n"])
def test_names_that_would_not_be_file_names(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a segment's name"):
        segment_prefix("job", text)
    with pytest.raises(ValueError, match="cannot be part of a segment's name"):
        segment_prefix(text)


def test_segments_of_a_dead_owner_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in ("rlmesh-j-a-0", "rlmesh-j-a-12", "rlmesh-j-ab-0", "rlmesh-j-a-b-0", "rlmesh-k-a-0", "a"):
        (tmp_path / name).write_text("")
    assert remove_segments("j", "a", str(tmp_path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "rlmesh-j-a-b-0", "rlmesh-j-ab-0", "rlmesh-k-a-0"]


def test_segments_of_a_dead_process_are_removed_and_no_others(tmp_path: Path) -> None:
    """Those of all its runtimes; not those of another node, job or process, nor of a name that looks like a number."""
    gone = [f"rlmesh-j-1-{owner_name(0, name, 77, number)}-{k}" for name, number, k in (("A:0", 0, 0), ("x y", 31, 12))]
    stay = [
        f"rlmesh-j-1-{owner_name(1, 'A:0', 77)}-0", f"rlmesh-j-1-{owner_name(0, 'A:0', 777)}-0",
        f"rlmesh-j-2-{owner_name(0, 'A:0', 77)}-0", f"rlmesh-j-1-{owner_name(0, 'A-77', 5)}-0", "rlmesh-j-1-n0-A-77",
    ]  # fmt: skip
    for name in gone + stay:
        (tmp_path / name).write_text("")
    assert remove_segments_of_process("j-1", 0, 77, str(tmp_path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(stay)


def test_place_tells_file_systems_apart(tmp_path: Path) -> None:
    assert place() == place()
    assert place() != place(str(tmp_path))


@pytest.mark.parametrize(
    "fields", [None, [], "rlmesh", ["a", 1, 2, 3], ["a", 1, 2, 3, -1], ["a", 1, 2, 3, 1.0], ["a", 1, 2, 3, True],
               [b"a", 1, 2, 3, 4], ["a", 1, 2, 3, 1 << 63], {"a": 1}],
)  # fmt: skip
def test_what_is_no_descriptor_is_malformed(fields: object) -> None:
    with pytest.raises(MalformedFrame):
        Descriptor.parse(fields)
    with pytest.raises(MalformedFrame):
        SlotRelease.parse([*fields[:-1], None] if isinstance(fields, list) else fields)


def test_descriptors_survive_the_wire() -> None:
    descriptor, ended = Descriptor("rlmesh-j-a-0", 1, 2, 3, 4), SlotRelease("rlmesh-j-a-0", 1, 2, 3)
    assert Descriptor.parse(list(descriptor)) == descriptor
    assert SlotRelease.parse(list(ended)) == ended

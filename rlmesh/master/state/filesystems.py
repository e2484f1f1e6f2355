"""Detection of network file systems, on which SQLite's write-ahead log does not work."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x00C36400: "Ceph",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
}
"""``f_type`` of ``statfs(2)`` of file systems that other machines may write to, from ``linux/magic.h`` and the file
systems' own sources. FUSE is included because the file system behind it is unknown."""


def network_file_system(path: Path) -> str:
    """Return the name of the network file system that a path is on; empty on a local one.

    Raises:
        OSError: ``path`` does not exist.
    """
    return NETWORK.get(file_system_type(path), "")


def file_system_type(path: Path) -> int:
    """Return ``f_type`` of ``statfs(2)``.

    Raises:
        OSError: ``path`` does not exist.
    """
    # The first member of struct statfs is f_type, a long on the 64-bit systems that torch exists for.
    buffer = (ctypes.c_long * 64)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return int(buffer[0]) & 0xFFFFFFFF

"""The devices that CUDA shows under a mask, found by a separate process that only queries the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
if cuda.cuInit(0):
    sys.exit()
count = ctypes.c_int()
cuda.cuDeviceGetCount(ctypes.byref(count))
for i in range(count.value):
    device, text = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), i)
    cuda.cuDeviceGetUuid_v2(text, device)
    print(bytes(text).hex())
"""


def cuda_sees(mask: str | None, *, by_bus: bool = True) -> list[str]:
    """UUIDs of the devices, in CUDA's order, in a new process whose CUDA_VISIBLE_DEVICES is ``mask`` (None: unset)."""
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
    if mask is not None:
        env["CUDA_VISIBLE_DEVICES"] = mask
    if by_bus:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return [f"GPU-{uuid.UUID(line)}" for line in result.stdout.split()]


def masks(uuids: list[str]) -> list[str | None]:
    """Masks in all forms, for GPUs with these UUIDs in the order of their bus ids."""
    first, last, n = uuids[0], uuids[-1], len(uuids)
    return [
        None, "", "-1", "NoDevFiles", "none", "all", "0", str(n - 1), str(n), "0,-1", "-1,0", f"0,{n}", f"{n},0",
        "0,0", "0,x", "x,0", "0x", "0 ", " 0", "0,,", ",0", "+0", "00", "0.5", ",".join(map(str, reversed(range(n)))),
        first, first[:12], first[:5], "GPU-", first.upper(), first.lower(), f"{last},{first}", f"{last},zzz,{first}",
        f"{first},{first}", f"{first},{n - 1}", f"0,{last}", f" {first}", f"{last}, {first}", "MIG-0000",
        "-2", "-0", "0 1", "0;1", "\t0", "0 ,1", "0\n", f"{first},-1,{last}", f"{first},", f"{first} ,{last}",
        f"{first}x", f"{first}-0", first.replace("-", ""), first[4:], "\u0661", "0,\u0661", "4294967296",
        "18446744073709551616", "4294967295", "2147483648", "-4294967296", "1e0", "0x1", "08", "''0", "0,1,0",
        f"{last},{first},{last}",
    ]  # fmt: skip

"""What `test_small_shm` runs where /dev/shm has 16 MiB. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys

from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.pool import PoolExhausted, SegmentPool
from rlmesh.memory.room import MemoryBudget

MIB = 1 << 20


def reason(pool: SegmentPool, nbytes: int) -> str:
    try:
        pool.put([bytes(nbytes)])
    except PoolExhausted as error:
        return str(error)
    return ""


def main() -> None:
    found: dict[str, object] = {"size_mib": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize // MIB}
    careful = SegmentPool("small", "careful")
    found["asked_before"] = reason(careful, 32 * MIB)
    # As if somebody else took the space between the question and the reservation.
    hasty = SegmentPool("small", "hasty", room=lambda _: MemoryBudget(1 << 40, "nothing"))
    found["refused"] = reason(hasty, 32 * MIB)
    found["left_behind"] = os.listdir("/dev/shm")

    exchange = MemoryExchange("small", "main", wake=lambda: None)
    big, little = exchange.capture([b"b" * (32 * MIB), b"l" * (2 * MIB)])
    found["captured_as"] = [type(big).__name__, type(little).__name__]
    found["contents"] = [bytes(big) == b"b" * (32 * MIB), bytes(little) == b"l" * (2 * MIB)]

    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1 << 16)):
                pass
        except OSError as error:
            found["full"] = error.strerror
    # All of a segment's pages exist and copies of pages are not the file system's: nothing here can be a bus error.
    del big, little
    kept = [exchange.capture([bytes([i]) * MIB])[0] for i in range(3)]
    loans = [exchange.add_ref(frame, "R") for frame in kept]
    views = [exchange.borrow([loan], "L")[0] for loan in loans if loan is not None]
    for view in views:
        writable(view)[:] = b"w" * len(view)
    found["in_full"] = [len(views), all(view == b"w" * MIB for view in views), bytes(kept[1]) == b"\1" * MIB]
    found["full_refused"] = reason(exchange.pool, 4 * MIB)
    exchange.close(0)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

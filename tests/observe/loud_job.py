"""A job whose members print a lot: eight alike, one a burst, one what is no text, one half a line before it dies."""

import os
import signal
import sys

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc

RANKS = 8
SAME_LINES = 1000
BURST_BYTES = 5_000_000
HALF, BURST, NO_TEXT = 3, 5, 6
STEPS = 20


def burst_line(number: int) -> str:
    return f"burst {number:06d} ".ljust(99, "x")


class Loud:
    @rpc
    def speak(self) -> None:
        rank = current_worker().rank
        print(f"rank {rank} of {RANKS}")
        for _ in range(SAME_LINES):
            print("the same at all ranks")
        sys.stdout.flush()
        if rank == BURST:
            sys.stdout.write("".join(burst_line(number) + "\n" for number in range(BURST_BYTES // 100)))
            sys.stdout.flush()
        if rank == NO_TEXT:
            os.write(1, b"caf\xe9 \xff\xfe end\n")

    @rpc
    def step(self) -> int:
        return 1

    @rpc
    def die(self) -> None:
        if current_worker().rank == HALF:
            os.write(1, b"half a li")
            os.kill(os.getpid(), signal.SIGKILL)


class Trainer:
    def run(self) -> None:
        group = RoleGroup[Loud]("LOUD")
        spoken = group.call(Loud.speak)
        for step in range(STEPS):
            current_worker().report(step, done=sum(group.call(Loud.step).result()))
        spoken.result()
        group.call(Loud.die).result()


def build() -> DLJob:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("LOUD").run(Loud).total(RANKS).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()


if __name__ == "__main__":
    build().submit("loud")

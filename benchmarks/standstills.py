"""Seeded standstills and jumps of the wall clock: a job goes on as if nothing had happened.

``python benchmarks/standstills.py --standstills 20 --jumps 20 --seed 1``

A standstill stops all processes of a job on one or two nodes for 0.5 to 10 times the lease, as ``scontrol suspend``, a
laptop's lid or a move of a virtual machine do, and lets them go on in some order, within a second. A jump sets the wall
clock that all of them see back or forth by an hour, at some moment: a library that is preloaded adds it to what the
kernel says, the machine's own clock stays as it is. Right is: the job succeeds with the right result, and no member was
started again. Exit code 0: all went on.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from small_job import right
from tries import Running, in_turn, running

LEASE_S = 3.0
LONGEST = 10.0
"""Of the standstills, in leases."""
STEPS, PAUSE_S = 40, 0.1
LIMIT_S = 60.0
HOUR_S = 3600
SHIFT_VARIABLE = "RLMESH_TRY_SHIFT"
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *shift;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RLMESH_TRY_SHIFT");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    shift = at == MAP_FAILED ? 0 : at;
    real = dlsym(RTLD_NEXT, "clock_gettime");
}
int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (!code && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *shift;
    return code;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return code;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@dataclass(frozen=True)
class Standstill:
    """All processes stop for a time, and go on in an order, spread over some seconds."""

    number: int
    nodes: int
    seconds: float
    after_s: float
    order: str
    spread_s: float
    seed: int

    def __str__(self) -> str:
        where = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{where}, {self.seconds:.1f} s at {self.after_s:.1f} s, {self.order}, within {self.spread_s:.1f} s"


@dataclass(frozen=True)
class Jump:
    """The wall clock is set by some seconds."""

    number: int
    nodes: int
    seconds: int
    after_s: float

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)}, wall clock {self.seconds:+d} s at {self.after_s:.1f} s"


@dataclass(frozen=True)
class Ended:
    """What became of a try; ``wrong`` is empty if the job went on."""

    what: Standstill | Jump
    took_s: float
    wrong: tuple[str, ...]
    output: str


def drawn(standstills: int, jumps: int, seed: int, longest: float) -> list[Standstill | Jump]:
    """Both kinds, from the shortest standstill to the longest, at moments that the seed gives."""
    source = random.Random(seed)
    tries: list[Standstill | Jump] = []
    for number in range(standstills):
        share = number / max(1, standstills - 1)
        seconds = LEASE_S * 0.5 * (longest / 0.5) ** share
        order = source.choice(("as stopped", "reversed", "shuffled"))
        tries.append(
            Standstill(
                number,
                1 + number % 2,
                seconds,
                source.uniform(0.5, 4.5),
                order,
                source.uniform(0.0, 1.0),
                source.getrandbits(16),
            )
        )
    for number in range(jumps):
        seconds = HOUR_S if number // 2 % 2 else -HOUR_S
        tries.append(Jump(standstills + number, 1 + number % 2, seconds, source.uniform(0.0, 4.5)))
    return tries


def build_shim(folder: str) -> str:
    """The library that shifts the wall clock of whoever loads it."""
    source, library = Path(folder) / "shift.c", Path(folder) / "shift.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def attempt(what: Standstill | Jump, shim: str) -> Ended:
    arguments = ["--steps", str(STEPS), "--pause", str(PAUSE_S), "--nodes", str(what.nodes), "--lease", str(LEASE_S)]
    if isinstance(what, Standstill):
        with running(arguments) as job:
            stand_still(job, what)
            return judge(job, what)
    with tempfile.NamedTemporaryFile() as shift:
        set_shift(shift.name, 0)
        with running(arguments, {"LD_PRELOAD": shim, SHIFT_VARIABLE: shift.name}) as job:
            time.sleep(what.after_s)
            set_shift(shift.name, what.seconds)
            return judge(job, what)


def set_shift(path: str, seconds: int) -> None:
    with open(path, "r+b") as file:
        file.write(struct.pack("l", seconds))


def stand_still(job: Running, what: Standstill) -> None:
    time.sleep(what.after_s)
    stopped: list[int] = []
    while new := [found.pid for found in job.processes() if found.pid not in stopped]:  # those that were just started
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped += new
    time.sleep(what.seconds)
    if what.order == "reversed":
        stopped.reverse()
    elif what.order == "shuffled":
        random.Random(what.seed).shuffle(stopped)
    for pid in stopped:
        send(pid, signal.SIGCONT)
        time.sleep(what.spread_s / len(stopped))


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def judge(job: Running, what: Standstill | Jump) -> Ended:
    began = time.monotonic()
    code = job.wait(LIMIT_S)
    took_s = time.monotonic() - began
    output = job.output()
    wrong = []
    if code is None:
        wrong.append(f"after {LIMIT_S:g} s it still ran")
    elif code != 0:
        wrong.append(f"exit code {code}")
    elif f"RESULT {right(STEPS)} RESTARTS 0" not in output:
        wrong.append("the result is wrong, or members were started again")
    elif isinstance(what, Jump):
        wall = re.search(r"WALL (\d+)", output)
        if wall is None or abs(int(wall[1]) - time.time() - what.seconds) > LIMIT_S:
            wrong.append("the members did not see the jump")
    if code is not None:
        wrong += [f"left: {left}" for left in job.left()]
    return Ended(what, took_s, tuple(wrong), output if wrong else "")


def tell(ended: Ended, *, keep: str) -> None:
    verdict = "went on" if not ended.wrong else "WRONG: " + "; ".join(ended.wrong)
    print(f"{ended.what.number:4} {ended.what}: {ended.took_s:.1f} s later, {verdict}", flush=True)
    if keep and ended.wrong:
        os.makedirs(keep, exist_ok=True)
        Path(keep, f"{ended.what.number}.txt").write_text(ended.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--standstills", type=int, default=20)
    parser.add_argument("--jumps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=LONGEST, help="standstill, in leases")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the tries that are carried out")
    parser.add_argument("--keep", default="", help="folder for the output of those that went wrong")
    args = parser.parse_args()
    tries = [
        each
        for each in drawn(args.standstills, args.jumps, args.seed, args.longest)
        if args.only is None or each.number in args.only
    ]
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder) if args.jumps else ""
        results = in_turn(partial(attempt, shim=shim), tries, args.at_once, partial(tell, keep=args.keep))
    good = sum(not ended.wrong for ended in results)
    print(f"{good} of {len(results)} went on, seed {args.seed}")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Seeded kills: whoever of a small job's processes dies or is stopped, at whatever moment, the job ends right.

``python benchmarks/kills.py --kills 30 --seed 1`` runs as many small jobs. In each of them one process (guardian,
agent, master, zygote, worker or driver) is killed (KILL), stopped for good (STOP), crashed (SEGV), or left without
memory (RLIMIT_AS at what it has), at a drawn moment. Right is: within 30 s the job has ended with the right result, or
with an error that names the cause, and nothing is left of it: no process, no shared memory, no folder of sockets. A
driver that is stopped goes on after some seconds, as after Ctrl-Z. Exit code 0: all ended right.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial

from small_job import right
from tries import Found, Running, in_turn, running

TARGETS = ("guardian", "agent", "master", "zygote", "worker", "driver")
HOW = ("KILL", "STOP", "SEGV", "memory")
STEPS = 15
LIMIT_S = 30.0
LATEST_S = 2.5
"""Moments are drawn from the start until then; the job takes somewhat longer."""
DRIVER_STOPS_S = 3.0
AGAIN = 3
CAUSES = {
    "guardian": ("guardian",), "agent": ("agent",), "master": ("master",), "zygote": ("zygote",),
    "worker": ("WORKER", "TRAINER"), "driver": ("MemoryError", "emory", "thread", "failed to map segment", "RLIMIT_AS"),
}  # fmt: skip
"""One of these stands in the error of a job that did not succeed."""


@dataclass(frozen=True)
class Kill:
    """One try."""

    number: int
    target: str
    how: str
    after_s: float
    draw: int


@dataclass(frozen=True)
class Ended:
    """What became of it; ``wrong`` is empty if it ended right."""

    kill: Kill
    outcome: str
    took_s: float
    wrong: tuple[str, ...]
    output: str


def drawn(count: int, seed: int) -> list[Kill]:
    """Every target in every way in turn, at moments that the seed gives."""
    source = random.Random(seed)
    cells = [(target, how) for target in TARGETS for how in HOW]
    source.shuffle(cells)
    return [
        Kill(number, *cells[number % len(cells)], source.uniform(0.0, LATEST_S), source.getrandbits(16))
        for number in range(count)
    ]


def attempt(kill: Kill) -> Ended:
    """Carry out one; a job that had ended before its moment is run again, and hit earlier."""
    after_s = kill.after_s
    for _ in range(AGAIN):
        with running(["--steps", str(STEPS)]) as job:
            victim = hit(job, kill, after_s)
            if victim is not None:
                return judge(job, kill, victim)
        after_s *= 0.6
    return Ended(kill, "missed", 0.0, ("the job had ended before its moment",), "")


def hit(job: Running, kill: Kill, after_s: float) -> Found | None:
    """Do it to one of the targets when the moment has come and there is one."""
    time.sleep(max(0.0, job.began + after_s - time.monotonic()))
    while job.process.poll() is None:
        targets = sorted((found for found in job.processes() if found.what == kill.target), key=lambda found: found.pid)
        if kill.target in ("guardian", "zygote"):
            targets = targets[:1]  # a fork of it has its name until it is the agent or a worker
        if targets:
            victim = targets[kill.draw % len(targets)]
            try:
                harm(victim.pid, kill.how)
            except ProcessLookupError:
                continue
            return victim
        time.sleep(0.01)
    return None


def harm(pid: int, how: str) -> None:
    """Kill, stop or starve a process.

    Raises:
        ProcessLookupError: it has ended.
    """
    if how == "memory":
        with open(f"/proc/{pid}/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    else:
        os.kill(pid, signal.Signals[f"SIG{how}"])


def judge(job: Running, kill: Kill, victim: Found) -> Ended:
    began = time.monotonic()
    if kill.target == "driver" and kill.how == "STOP":
        time.sleep(DRIVER_STOPS_S)
        os.kill(victim.pid, signal.SIGCONT)
    code = job.wait(LIMIT_S)
    took_s = time.monotonic() - began
    output = job.output()
    wrong = []
    died = kill.target == "driver" and code is not None and code < 0  # nobody is left to tell
    if code is None:
        outcome = "still ran"
        states = ", ".join(f"{found.what} {found.pid}" for found in job.processes())
        wrong.append(f"after {LIMIT_S:g} s it still ran: {states}")
    elif code == 0:
        outcome = "succeeded"
        if f"RESULT {right(STEPS)} " not in output:
            wrong.append("the result is wrong or missing")
    else:
        outcome = "failed"
        # A script whose memory is limited while it still imports fails by Python's own error: there is no job yet.
        early = kill.target == "driver" and "Traceback" in output and not [*(job.folder / "runs").glob("*")]
        if not died and not early and not any(cause in output for cause in CAUSES[kill.target]):
            wrong.append(f"exit code {code}, and the error names no cause")
    if code is not None:
        wrong += [f"left: {what}" for what in job.left(looks=died)]
    return Ended(kill, outcome, took_s, tuple(wrong), output if wrong else "")


def tell(ended: Ended, *, keep: str) -> None:
    kill = ended.kill
    verdict = "right" if not ended.wrong else "WRONG: " + "; ".join(ended.wrong)
    print(
        f"{kill.number:4} {kill.target:9} {kill.how:7} at {kill.after_s:4.2f} s: {ended.outcome} "
        f"{ended.took_s:.1f} s later, {verdict}", flush=True,
    )  # fmt: skip
    if keep and ended.wrong:
        os.makedirs(keep, exist_ok=True)
        with open(os.path.join(keep, f"{kill.number}-{kill.target}-{kill.how}.txt"), "w") as file:
            file.write(ended.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the kills that are carried out")
    parser.add_argument("--keep", default="", help="folder for the output of those that went wrong")
    args = parser.parse_args()
    kills = [kill for kill in drawn(args.kills, args.seed) if args.only is None or kill.number in args.only]
    results = in_turn(attempt, kills, args.at_once, partial(tell, keep=args.keep))
    good = sum(not ended.wrong for ended in results)
    print(f"{good} of {len(results)} ended right, seed {args.seed}")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Counts what one warm call runs through: python benchmarks/call_path.py [--list]

A plain thread calls ``group.call("echo", x).result()`` on one member in another process, over a Unix socket. A profile
hook on all threads of both processes notes each Python function that begins. Prints medians over many calls: Python
calls, and modules of rlmesh with at least one of them, at the caller, at the callee, and in both. Waiting threads sleep
(``busy_poll_s=0``), since the number of looks at a socket depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import rlmesh
from rlmesh import RoleGroup, Runtime, rpc
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.connections.network import NetworkOptions

CALLS, WARM_UP = 200, 50
SETTLE_S = 0.005
"""Time after an answer in which both processes finish their work for the call."""
KEY = b"callpath-0123456789abcdef-callpa"
LIBRARY = str(Path(rlmesh.__file__).parent)

Step = tuple[int, str, str]
"""One Python function that began: ns of `time.perf_counter_ns`, its file, its name."""
steps: list[Step] = []


def note(frame: FrameType, event: str, _: object) -> None:
    """The profile hook: notes functions of Python, not those of C."""
    if event == "call":
        code = frame.f_code
        steps.append((time.perf_counter_ns(), code.co_filename, code.co_qualname))


def profile_all_threads() -> None:
    """Install the hook in this thread and in all that start later."""
    threading.setprofile(note)
    sys.setprofile(note)


class Member:
    @rpc
    def echo(self, value: int) -> int:
        return value

    @rpc
    def take_steps(self) -> list[Step]:
        taken = steps.copy()
        steps.clear()
        return taken


def stop_at_end_of_input(runtime: Runtime) -> None:
    sys.stdin.read()
    runtime.stop_main(now=True)


def serve(directory: str) -> None:
    profile_all_threads()
    with Runtime.start(name="M:0", key=KEY, socket_dir=directory) as runtime:
        runtime.expect("M:0")
        runtime.serve("M:0", Member())
        print(runtime.endpoint, flush=True)
        threading.Thread(target=stop_at_end_of_input, args=(runtime,), daemon=True).start()
        runtime.run_main()


def one_call(group: RoleGroup[Any], member: Any) -> tuple[list[Step], list[Step]]:
    """The steps of one call at the caller and at the callee."""
    steps.clear()
    began = time.perf_counter_ns()
    group.call("echo", 1).result()
    time.sleep(SETTLE_S)
    ended = time.perf_counter_ns()
    here = [step for step in steps if began <= step[0] < ended]
    there = [step for step in member.call("take_steps").result() if began <= step[0] < ended]
    return here, there


def modules_of(found: list[Step]) -> set[str]:
    return {file for _, file, _ in found if file.startswith(LIBRARY)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts what one warm call runs through.")
    parser.add_argument("--list", action="store_true", help="print the functions of a typical call, in their order")
    parser.add_argument("--serve", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    profile_all_threads()
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        command = [sys.executable, __file__, "--serve", directory]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
            Runtime.start(name="caller", key=KEY, bind=False, network=NetworkOptions(busy_poll_s=0)) as runtime,
        ):
            assert process.stdin is not None and process.stdout is not None
            address = MemberAddress("M", 0, 0, process.stdout.readline().strip())
            runtime.set_address_book(AddressBook(1, (address,)))
            member = runtime.peer("M:0", address.endpoint or "")
            member.call("take_steps").result()
            group: RoleGroup[Any] = RoleGroup("M", runtime=runtime)
            runs = [one_call(group, member) for _ in range(WARM_UP + CALLS)][WARM_UP:]
            process.stdin.close()
    report([run[0] for run in runs], "at the caller", list_steps=options.list)
    report([run[1] for run in runs], "at the callee", list_steps=options.list)
    report([here + there for here, there in runs], "in both")


def report(runs: list[list[Step]], where: str, *, list_steps: bool = False) -> None:
    calls = statistics.median_low(len(run) for run in runs)
    own = statistics.median_low(sum(file.startswith(LIBRARY) for _, file, _ in run) for run in runs)
    modules = statistics.median_low(len(modules_of(run)) for run in runs)
    print(f"{calls:4} Python calls ({own} of them in rlmesh), {modules:2} modules of rlmesh {where}")
    if list_steps:
        orders = Counter(tuple(step[1:] for step in run) for run in runs if len(run) == calls)
        for file, name in orders.most_common(1)[0][0]:
            print(f"       {file.removeprefix(LIBRARY).lstrip('/')}: {name}")


if __name__ == "__main__":
    main()

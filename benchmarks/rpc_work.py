"""The work of benchmarks/rpc.py, the same for every runtime, and the program that does it with one of them.

Run by rpc.py as ``python rpc_work.py NAME FOLDER ROW …``. Prints a JSON line per figure.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rpc_peer import Peer, expect, seconds_of, tensor
from rpc_processes import end_with_parent

CALLS = 1000
MEMBERS = 8
GROUP_CALLS = 200
WINDOW, WINDOWS = 1000, 7
MEMORY_WINDOW, MEMORY_WINDOWS, BURST = 500, 100, 20_000
TENSOR_CALLS = {1: 30, 64: 6, 512: 3}
"""Timed calls per size of a tensor in MiB."""
TENSOR_WARM_UP = 2
WAITING = 100
STEP_LIMIT_S = 90.0
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
DEATH_LIMIT_S = 20.0

Figures = dict[str, float]


def _median_us(times: Sequence[float]) -> float:
    return 1e6 * statistics.median(times)


async def echo(peer: Peer) -> Figures:
    return {"echo": _median_us(await seconds_of(lambda k: peer.call(0, "echo", k), CALLS))}


async def echo_def(peer: Peer) -> Figures:
    return {"echo_def": _median_us(await seconds_of(lambda k: peer.call(0, "echo_def", k), CALLS))}


async def echo_thread(peer: Peer) -> Figures:
    return {"echo_thread": _median_us(await asyncio.to_thread(peer.from_thread, CALLS))}


async def echo_worker(peer: Peer) -> Figures:
    return {"echo_worker": _median_us(await peer.between(CALLS))}


async def pipelined(peer: Peer) -> Figures:
    return {"pipelined": await _rate(peer, "echo")}


async def pipelined_def(peer: Peer) -> Figures:
    return {"pipelined_def": await _rate(peer, "echo_def")}


async def _rate(peer: Peer, method: str) -> float:
    """Calls per second."""
    rates = []
    for _ in range(1 + WINDOWS):
        start = time.perf_counter()
        answers = await peer.window(0, method, WINDOW)
        rates.append(WINDOW / (time.perf_counter() - start))
        expect(list(answers), list(range(WINDOW)))
    return statistics.median(rates[1:])


async def memory(peer: Peer) -> Figures:
    """Growth of the resident memory of caller and member over many calls, in MB, and how many answers were lost."""
    pids = [os.getpid(), await peer.call(0, "pid")]
    for _ in range(4):
        await peer.window(0, "echo", MEMORY_WINDOW)
    before = await _settled(peer, pids)
    _forget_peaks(pids)
    good = 0
    for count in [MEMORY_WINDOW] * MEMORY_WINDOWS + [BURST]:
        answers = await peer.window(0, "echo", count)
        good += sum(1 for number, answer in enumerate(answers) if answer == number)
        del answers
    peaks = [_memory_mb(pid, "VmHWM") for pid in pids]
    after = await _settled(peer, pids)
    return {
        "memory_caller": after[0] - before[0],
        "memory_member": after[1] - before[1],
        "memory_peak": max(peak - start for peak, start in zip(peaks, before, strict=True)),
        "calls_lost": MEMORY_WINDOW * MEMORY_WINDOWS + BURST - good,
    }


async def _settled(peer: Peer, pids: Sequence[int]) -> list[float]:
    gc.collect()
    await peer.call(0, "collect")
    await asyncio.sleep(0.2)
    return [_memory_mb(pid, "VmRSS") for pid in pids]


def _forget_peaks(pids: Sequence[int]) -> None:
    """Let the kernel's record of the largest resident memory start anew (see proc(5), clear_refs)."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(f"/proc/{pid}/status has no {name}")


async def tensor_in(peer: Peer, mib: int) -> Figures:
    """GB/s of a tensor to a member."""
    data = tensor(mib)
    times, last = [], float(data[-1])
    for stamp in range(TENSOR_WARM_UP + TENSOR_CALLS[mib]):
        data[0] = stamp
        start = time.perf_counter()
        answer = await peer.call(0, "take", data)
        times.append(time.perf_counter() - start)
        expect(tuple(answer), (stamp, last))
    return {f"tensor_in_{mib}": (mib << 20) / statistics.median(times[TENSOR_WARM_UP:]) / 1e9}


async def tensor_out(peer: Peer, mib: int) -> Figures:
    """GB/s of a tensor from a member."""
    times, last = [], float((mib << 18) - 1)
    for stamp in range(TENSOR_WARM_UP + TENSOR_CALLS[mib]):
        start = time.perf_counter()
        answer = await peer.call(0, "give", mib, stamp)
        times.append(time.perf_counter() - start)
        expect((float(answer[0]), round(float(answer[-1]), -2)), (stamp, round(last, -2)))
        del answer
    return {f"tensor_out_{mib}": (mib << 20) / statistics.median(times[TENSOR_WARM_UP:]) / 1e9}


async def group(peer: Peer) -> Figures:
    async def same(number: int) -> int:
        expect(list(await peer.group("echo", number)), [number] * MEMBERS)
        return number

    return {"group": _median_us(await seconds_of(same, GROUP_CALLS))}


async def tensor_to_all(peer: Peer) -> Figures:
    data = tensor(64)
    times, last = [], float(data[-1])
    for stamp in range(TENSOR_WARM_UP + TENSOR_CALLS[64]):
        data[0] = stamp
        start = time.perf_counter()
        answers = await peer.group("take", data)
        times.append(time.perf_counter() - start)
        expect([tuple(answer) for answer in answers], [(stamp, last)] * MEMBERS)
    return {"tensor_to_all": MEMBERS * (64 << 20) / statistics.median(times[TENSOR_WARM_UP:]) / 1e9}


async def death(peer: Peer) -> Figures:
    """Milliseconds from SIGKILL of a member until all calls that wait for it have failed."""
    pid = await peer.call(0, "pid")
    waits = [asyncio.create_task(_awaited(peer.call(0, "nap", 60.0)))]
    waits += [asyncio.create_task(_awaited(peer.call(0, "echo_def", k))) for k in range(WAITING - 1)]
    await asyncio.sleep(0.5)
    expect(sum(task.done() for task in waits), 0)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    _, waiting = await asyncio.wait(waits, timeout=DEATH_LIMIT_S)
    took = time.perf_counter() - start
    for task in waiting:
        task.cancel()
    if waiting:
        raise TimeoutError(f"{len(waiting)} of {WAITING} calls still waited after {DEATH_LIMIT_S:.0f} s")
    expect(sum(task.exception() is not None for task in waits), WAITING)
    return {"death": 1e3 * took}


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


Step = Callable[[Peer], Awaitable[Figures]]


def _of_size(step: Callable[[Peer, int], Awaitable[Figures]], mib: int) -> Step:
    return lambda peer: step(peer, mib)


ONE_MEMBER: dict[tuple[str, ...], Step] = {
    ("echo",): echo,
    ("echo_def",): echo_def,
    ("echo_thread",): echo_thread,
    ("pipelined",): pipelined,
    ("pipelined_def",): pipelined_def,
    ("memory_caller", "memory_member", "memory_peak", "calls_lost"): memory,
    **{(f"tensor_in_{mib}",): _of_size(tensor_in, mib) for mib in TENSOR_CALLS},
    **{(f"tensor_out_{mib}",): _of_size(tensor_out, mib) for mib in TENSOR_CALLS},
}
ALL_MEMBERS: dict[tuple[str, ...], Step] = {
    ("echo_worker",): echo_worker,
    ("group",): group,
    ("tensor_to_all",): tensor_to_all,
    ("death",): death,
}


def say(**figure: Any) -> None:
    print(json.dumps(figure), flush=True)


async def measure(peer: Peer, rows: set[str]) -> None:
    """Say each wanted row, or why it has no value."""
    own: dict[str, Callable[[], Awaitable[Figures]]] = getattr(peer, "own_rows", dict)()
    for members, steps in ((1, ONE_MEMBER), (MEMBERS, ALL_MEMBERS)):
        started = f"members_{members}"
        todo = {keys: step for keys, step in steps.items() if rows & set(keys) and not own.keys() & set(keys)}
        if not todo and started not in rows - own.keys():
            continue
        start = time.perf_counter()
        await asyncio.wait_for(peer.start(members), START_LIMIT_S)
        if started in rows - own.keys():
            say(row=started, value=time.perf_counter() - start)
        for keys, step in todo.items():
            await _say_figures(keys, step(peer), rows)
        try:
            await asyncio.wait_for(peer.stop(), STOP_LIMIT_S)
        except Exception:
            traceback.print_exc()  # What is left is ended by whoever started this.
    for key, row in own.items():
        if key in rows:
            await _say_figures((key,), row(), rows)


async def _say_figures(keys: tuple[str, ...], work: Awaitable[Figures], rows: set[str]) -> None:
    try:
        figures = await asyncio.wait_for(work, STEP_LIMIT_S)
    except Exception as error:
        traceback.print_exc()
        for key in rows & set(keys):
            say(row=key, error=f"{type(error).__name__}: {error}".rstrip(": "))
    else:
        for key in rows & set(keys):
            say(row=key, value=figures[key])


def main() -> None:
    end_with_parent()
    name, folder, *rows = sys.argv[1:]
    try:
        module = importlib.import_module(f"rpc_{name}")
        peer: Peer = module.Peer(Path(folder))
    except ImportError as error:
        say(absent=str(error))
        return
    run = asyncio.run if getattr(module, "STOCK_LOOP", False) else importlib.import_module("uvloop").run
    try:
        run(measure(peer, set(rows)))
    except Exception as error:
        traceback.print_exc()
        say(failed=f"{type(error).__name__}: {error}".rstrip(": "))
    sys.stdout.flush()
    os._exit(0)  # Some runtimes do not let the interpreter end; whoever started this ends what is left.


if __name__ == "__main__":
    main()

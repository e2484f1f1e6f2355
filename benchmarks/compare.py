"""Two checkouts, measured in turns: python benchmarks/compare.py --before DIR --after DIR --pairs 10

Each round runs one benchmark program of this checkout in fresh processes that import rlmesh from one of the two, by
PYTHONPATH, with compiled modules in a cache of its own: a first run of each, which is not counted, compiles them. The
two of a pair run one after the other, and every second pair the other way round, so that a machine that gets slower or
faster meanwhile touches both alike. Per row it prints both medians, by how much the later one is slower (the mean of
the pairs' ratios, where 0 % is the same), the 95 % interval of that difference (Student's t on the logarithms of the
ratios), and whether the interval lies wholly above +3 %. Exit code 1 if that is so for any row.

The program is benchmarks/rpc.py with its rows of rlmesh that take seconds; ``--program 'weights.py --cpu --json'``,
``startup.py`` or ``'restarts.py --json'`` names another: JSON lines and lines of text with a time in them are read.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

HERE = Path(__file__).resolve().parent
RPC = "rpc.py"
RPC_ROWS = (
    "echo", "pipelined", "group", "tensor_in_1", "tensor_out_1", "tensor_in_64", "tensor_out_64", "tensor_to_all",
    "members_", "death", "import_time",
)  # fmt: skip
"""Those that are over in half a minute together; the rows of memory, and tensors of 512 MiB, are not among them."""
LIMIT_S = 300.0
MOST_SLOWER = 0.03
LEAST_PAIRS = 3
# Two-sided 95 % quantiles of Student's t, by degrees of freedom; beyond 30 by a series in 1/df.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One row of one run."""

    value: float
    unit: str = ""
    better: str = "lower"


@dataclass
class Pairs:
    """One row, in all pairs in which both runs have it."""

    unit: str
    better: str
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def slower(self) -> list[float]:
        """By pair, the logarithm of how many times slower the later checkout is."""
        ratios = [math.log(b / a) for a, b in zip(self.before, self.after, strict=True)]
        return ratios if self.better == "lower" else [-ratio for ratio in ratios]


@dataclass(frozen=True)
class Difference:
    """As shares of the earlier checkout: 0.03 is 3 % slower."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > MOST_SLOWER:
            return f"slower by more than {100 * MOST_SLOWER:.0f} %"
        if self.high <= MOST_SLOWER:
            return "faster" if self.high < 0 else "not slower"
        return "undecided: more pairs"


def t_95(degrees: int) -> float:
    """The factor by which a mean's standard error is multiplied for its 95 % interval."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def difference(slower: Sequence[float]) -> Difference | None:
    """The mean of logarithms of ratios, and the interval that holds the true one in 95 of 100 cases; None if there are
    too few to say."""
    if len(slower) < LEAST_PAIRS:
        return None
    mean = statistics.fmean(slower)
    half = t_95(len(slower) - 1) * statistics.stdev(slower) / math.sqrt(len(slower))
    return Difference(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


def rows_of(text: str) -> dict[str, Figure]:
    """The figures in what a benchmark program printed, in its order.

    JSON lines of the forms ``{"row": …, "value": …, "unit": …, "better": …}``, ``{"what": …, "seconds": …}`` or
    ``{"name": number, …}``, and lines of text with a label, two spaces and a time. What is no figure is passed over.
    """
    rows: dict[str, Figure] = {}
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            if (told := re.match(r"\s*(\S.*?)\s{2,}([\d.]+) (s|ms|µs)\b", line)) is not None:
                rows[told[1].rstrip(":")] = Figure(float(told[2]), told[3])
            continue
        if isinstance(found, dict):
            rows.update(_of_object(found))
    return rows


def _of_object(found: Mapping[str, Any]) -> dict[str, Figure]:
    if "row" in found or "what" in found:
        row = "row" in found
        name, value = found["row" if row else "what"], found.get("value" if row else "seconds")
        unit = found.get("unit", "") if row else "s"
        return {str(name): Figure(value, unit, found.get("better", "lower"))} if _is_number(value) else {}
    return {
        name: Figure(value, "", "higher")
        if name.endswith("_per_s")
        else Figure(value, "s" if name.endswith("_s") else "")
        for name, value in found.items()
        if _is_number(value)
    }


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def collect(pairs: Iterable[tuple[Mapping[str, Figure], Mapping[str, Figure]]]) -> dict[str, Pairs]:
    """By row; figures that have no ratio, zeros and what one of the two runs lacks, are left out."""
    rows: dict[str, Pairs] = {}
    for before, after in pairs:
        for name, one in before.items():
            other = after.get(name)
            if other is not None and one.value > 0 and other.value > 0:
                row = rows.setdefault(name, Pairs(one.unit, one.better))
                row.before.append(one.value)
                row.after.append(other.value)
    return rows


def table(rows: Mapping[str, Pairs]) -> str:
    """For people."""
    lines = [["row", "unit", "pairs", "before", "after", "slower by", "95 % interval", "verdict"]]
    for name, row in rows.items():
        medians = [f"{statistics.median(values):.4g}" for values in (row.before, row.after)]
        found = difference(row.slower)
        told = ["–", "–", f"fewer than {LEAST_PAIRS} pairs"]
        if found is not None:
            told = [f"{100 * found.mean:+.1f} %", f"{100 * found.low:+.1f} to {100 * found.high:+.1f} %", found.verdict]
        lines.append([name, row.unit, str(len(row.before)), *medians, *told])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def is_worse(rows: Mapping[str, Pairs]) -> bool:
    """Whether a row is slower by more than 3 %, beyond doubt."""
    found = (difference(row.slower) for row in rows.values())
    return any(each is not None and each.low > MOST_SLOWER for each in found)


# Running.


def measure(program: Sequence[str], checkout: Path, limit_s: float) -> dict[str, Figure]:
    """One run of a benchmark program with the library of a checkout.

    Raises:
        RuntimeError: it gave no figure.
    """
    with tempfile.TemporaryDirectory(prefix="compare-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "figures.json"
        more = ["--json", str(file)] if program[0] == RPC else []
        command = [sys.executable, str(HERE / program[0]), *program[1:], *more]
        try:
            done = subprocess.run(
                command, cwd=folder, env=_environment(checkout), capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{program[0]} with {checkout} did not end within {limit_s:g} s") from None
        rows = rows_of(file.read_text() if more and file.exists() else done.stdout)
        if not rows:
            raise RuntimeError(f"{program[0]} with {checkout} gave no figure:\n{done.stderr[-2000:]}")
        return rows


def _environment(checkout: Path) -> dict[str, str]:
    """Variables for a run: the checkout's packages, with compiled modules as an installed package has them."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = f"{checkout}{os.pathsep}{checkout / 'launcher'}"
    return {**env, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": _compiled(checkout)}


@functools.cache
def _compiled(checkout: Path) -> str:
    """A folder for the compiled modules of a checkout, which this process removes when it ends."""
    folder = tempfile.mkdtemp(prefix=f"compare-{checkout.name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def imports_from(checkout: Path) -> Path:
    """Where a process finds rlmesh; anything but ``checkout / "rlmesh"`` would be measured in its place."""
    found = subprocess.run(
        [sys.executable, "-c", "import rlmesh; print(rlmesh.__file__)"], env=_environment(checkout), cwd="/",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Path(found.stdout.strip()).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    sides = (options.before.resolve(), options.after.resolve())
    for checkout in sides:
        if (found := imports_from(checkout)) != checkout / "rlmesh":
            print(f"{checkout}: rlmesh is imported from {found}: is this a checkout of it?", file=sys.stderr)
            return 2
    program = shlex.split(options.program)
    if program == [RPC]:
        program += ["--only", "rlmesh", "--repeat", "1", "--rows", *(options.rows or RPC_ROWS)]
    pairs: list[tuple[dict[str, Figure], dict[str, Figure]]] = []
    code = 0
    try:
        for side in (0, 1):  # not counted: it compiles the modules
            print(f"warm-up: {sides[side]}", file=sys.stderr, flush=True)
            measure(program, sides[side], options.limit)
        for number in range(options.pairs):
            found_by_side: dict[int, dict[str, Figure]] = {}
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                print(f"pair {number + 1} of {options.pairs}: {sides[side]}", file=sys.stderr, flush=True)
                found_by_side[side] = measure(program, sides[side], options.limit)
            pairs.append((found_by_side[0], found_by_side[1]))
    except KeyboardInterrupt:
        print("interrupted; this is what was measured until then", file=sys.stderr)
        code = 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        code = 2
    rows = {
        name: row for name, row in collect(pairs).items() if not options.rows or name.startswith(tuple(options.rows))
    }
    print(table(rows))
    if options.json is not None:
        lines = [
            {"row": name, "better": row.better, "before": row.before, "after": row.after} for name, row in rows.items()
        ]
        options.json.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return code or int(is_worse(rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the earlier checkout")
    parser.add_argument("--after", type=Path, required=True, metavar="DIR", help="the later one")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each (default 10)")
    parser.add_argument("--rows", nargs="+", metavar="KEY", help="rows whose names begin so")
    parser.add_argument("--program", default=RPC, help="in this folder, with its options (default rpc.py, rlmesh only)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values, a line per row")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

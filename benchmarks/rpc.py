"""The same calls on rlmesh, bare zmq.asyncio, Ray, xoscar and Monarch: python benchmarks/rpc.py

Each runtime does the work of rpc_work.py in a process of its own, with its default settings, one after the other;
after ``--repeat`` rounds the medians stand in a table beside how many times better rlmesh is than the best of Ray,
xoscar and Monarch, and than Ray. Times are of calls made one after the other unless the row says otherwise.

"8 members up" is for rlmesh a whole job from submit until all serve, for Ray eight actors of a cluster that runs,
for xoscar and Monarch their pool or mesh of processes.

The peers are optional: ``make bench-peers`` installs them into ``.venv-peers``; one that is not there is left out
and said to be. Run it with nothing else running: calls are short, and a busy machine is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rpc_processes import end_descendants, own_descendants, run_bounded
from rpc_rows import OURS, ROWS, Results, Row, table

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
MODULES = {"rlmesh": "rlmesh", "zmq": "zmq.asyncio", "ray": "ray", "xoscar": "xoscar", "monarch": "monarch.actor"}
"""The peers, and what their users import."""
WITH_OURS = ("rlmesh", "zmq")
"""Peers that run in the interpreter of this program."""
IMPORTS = 5
IMPORT_LIMIT_S = 60.0
MEASURE_IMPORT = """
import json, sys, time
before, start = len(sys.modules), time.perf_counter()
import {module}
took = time.perf_counter() - start
heavy = [name for name in ("torch", "numpy", "pydantic", "zmq") if name in sys.modules]
print(json.dumps([1e3 * took, len(sys.modules) - before, len(heavy)]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    peers = [peer for peer in MODULES if peer in options.only]
    rows = [row for row in ROWS if not options.rows or row.key.startswith(tuple(options.rows))]
    if not rows:
        print(f"no row begins so; there are {', '.join(row.key for row in ROWS)}", file=sys.stderr)
        return 2
    own_descendants()
    results = Results()
    code = 0
    try:
        _measure_all(peers, rows, results, options)
    except KeyboardInterrupt:
        print("interrupted; this is what was measured until then", file=sys.stderr)
        code = 130
    print(table(results, peers, rows))
    if options.json is not None:
        lines = results.lines(peers, rows)
        options.json.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return code or (1 if OURS in peers and OURS in results.absent else 0)


def _measure_all(peers: Sequence[str], rows: Sequence[Row], results: Results, options: argparse.Namespace) -> None:
    for number in range(options.repeat):
        for peer in peers:
            if peer not in results.absent:
                print(f"round {number + 1} of {options.repeat}: {peer}", file=sys.stderr, flush=True)
                python = sys.executable if peer in WITH_OURS else str(options.peers_python.absolute())
                _measure(peer, python, rows, results, options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), help="these runtimes")
    parser.add_argument("--rows", nargs="+", metavar="KEY", help="rows whose keys begin so: echo, tensor_in, …")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of which medians are taken (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a line per figure")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="interpreter that has the peers")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for one runtime in one round")
    parser.add_argument("--verbose", action="store_true", help="show what the runtimes print")
    return parser.parse_args(arguments)


def _measure(peer: str, python: str, rows: Sequence[Row], results: Results, options: argparse.Namespace) -> None:
    """One round of one peer. Nothing that it started is left afterwards."""
    if shutil.which(python) is None:
        results.absent[peer] = f"there is no {python}; make bench-peers installs the peers"
        return
    with ExitStack() as stack:
        # Socket paths are short, whatever the temporary directory of this machine.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpc-", dir="/tmp", ignore_cleanup_errors=True))
        stack.callback(end_descendants)
        keys = [row.key for row in rows]
        if any(key.startswith("import_") for key in keys):
            _measure_import(peer, python, folder, results)
        if all(key.startswith("import_") for key in keys):
            return
        command = [python, str(HERE / "rpc_work.py"), peer, folder, *keys]
        output, problem = run_bounded(command, _environment(), folder, options.limit, quiet=not options.verbose)
        _take(peer, output, results)
        if problem:
            _note_missing(peer, keys, problem, results)


def _take(peer: str, output: str, results: Results) -> None:
    """Read a peer's lines; what else it printed is passed over."""
    for line in output.splitlines():
        try:
            figure = json.loads(line)
        except ValueError:
            continue
        match figure:
            case {"row": str(row), "value": int() | float() as value}:
                results.add(peer, row, value)
            case {"row": str(row), "error": str(error)}:
                results.errors[peer, row] = error
            case {"absent": str(why)}:
                results.absent[peer] = why
            case {"failed": str(why)}:
                _note_missing(peer, [row.key for row in ROWS], why, results)


def _note_missing(peer: str, keys: Sequence[str], why: str, results: Results) -> None:
    for key in keys:
        if (peer, key) not in results.values:
            results.errors.setdefault((peer, key), why)


def _measure_import(peer: str, python: str, folder: str, results: Results) -> None:
    """Time of the import in a new interpreter, the modules that it adds, and how many of the heavy ones."""
    command = [python, "-c", MEASURE_IMPORT.format(module=MODULES[peer])]
    outputs = [run_bounded(command, _environment(), folder, IMPORT_LIMIT_S, quiet=True) for _ in range(1 + IMPORTS)]
    try:
        figures = [json.loads(output) for output, _ in outputs[1:]]  # The first one warms the file cache.
    except ValueError:
        for row in ("import_time", "import_modules", "import_heavy"):
            results.errors[peer, row] = f"import {MODULES[peer]} failed"
        return
    for row, values in zip(("import_time", "import_modules", "import_heavy"), zip(*figures, strict=True), strict=True):
        results.add(peer, row, statistics.median(values))


def _environment() -> dict[str, str]:
    """The caller's, with this folder and the library importable, also in the processes that runtimes start. A library
    that the caller's PYTHONPATH has comes first: compare.py measures other checkouts so."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", ""), str(HERE.parent), str(HERE.parent / "launcher")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    sys.exit(main())

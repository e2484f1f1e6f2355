"""``rlmesh launch`` on several nodes, each in a process tree of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlmesh.runtime.connections.security import write_key_file
from tests.master.launched import Launched

SPREAD = Path(__file__).with_name("spread_job.py")


def node(
    folder: Path, rank: int | None, nnodes: int | str, endpoint: str, *arguments: str,
    options: Sequence[str] = (), prefix: Sequence[str] = (), script: Path = SPREAD,
) -> Launched:  # fmt: skip
    """One node of the job; rank 0 gets the script and its arguments. ``prefix``: what goes before ``launch``."""
    key = folder / "job.key"
    if not key.exists():
        write_key_file(key)
    words = ["--nnodes", str(nnodes), "--rdzv-endpoint", endpoint, "--key-file", str(key), "--view", "plain", *options]
    if rank is not None:
        words += ["--node-rank", str(rank)]
    if not rank:
        words += ["--run-dir", str(folder / "run"), str(script), *arguments]
    return Launched([*(prefix or ["-m", "rlmesh.cli.main"]), "launch", *words], folder)


@contextmanager
def two_nodes(
    folder: Path, host: str, *arguments: str, prefix: Sequence[str] = ()
) -> Iterator[tuple[Launched, Launched]]:
    """Head and node 1, over a port that the system chose; the endpoint is the one that the head announced."""
    with ExitStack() as stack:
        head = stack.enter_context(node(folder, 0, 2, f"{host}:0", *arguments, prefix=prefix))
        endpoint = head.wait_for(r"node 0 of 2 listens at (\S+)")[1]
        yield head, stack.enter_context(node(folder, 1, 2, endpoint, prefix=prefix))

"""Options of ``rlmesh launch`` for metrics, timelines and rehearsed failures."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlmesh.master.chaos_plan import parse_kill
from rlmesh.master.jobspec import ObserveOptions
from rlmesh.observe.prometheus import parse_address

__all__ = ["add_options", "options_of"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of ``rlmesh launch``."""
    parser.add_argument(
        "--chaos", action="append", default=[], metavar="KILL",
        help="rehearse a failure, such as REWARD:0@step=5, ACTOR@call=save, master@shutdown or "
        "random:seed=1,kills=3,within=30; can be repeated (see rlmesh chaos --help)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", default="", metavar="ADDRESS",
        help="serve metrics to Prometheus at 127.0.0.1:PORT (0: any; it is in metrics.address) or unix:PATH",
    )  # fmt: skip
    parser.add_argument(
        "--tracker", action="append", default=[], metavar="NAME",
        help="show metrics in wandb, mlflow, trackio, each also with a project (wandb:PROJECT), or module:Class; "
        "can be repeated",
    )  # fmt: skip
    parser.add_argument("--timeline", action="store_true", help="trace single calls, for rlmesh timeline")


def options_of(parsed: argparse.Namespace) -> ObserveOptions | None:
    """The parsed options; None if none was given.

    Raises:
        UsageError: a kill, a tracker or an address is not valid.
    """
    for text in parsed.chaos:
        if not text.startswith("random"):
            parse_kill(text)
    if parsed.tracker:
        from rlmesh.observe.trackers.trackers import Trackers

        Trackers(parsed.tracker)
    metrics = parsed.metrics
    if metrics:
        address = parse_address(metrics)
        if isinstance(address, Path):
            metrics = f"unix:{address.absolute()}"  # the script may change the directory
    options = ObserveOptions(tuple(parsed.chaos), metrics, parsed.timeline)
    return options if options != ObserveOptions() else None

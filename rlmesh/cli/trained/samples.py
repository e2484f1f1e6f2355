"""``rlmesh samples [JOB]``: shows the samples of a training, in the terminal or as a page of HTML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlmesh.cli.job_choice import add_job_argument, as_command, check_own, check_run, find_any
from rlmesh.cli.output_file import write_output
from rlmesh.errors import UsageError
from rlmesh.observe.views.safe_text import shown

DESCRIPTION = """\
Show prompts and responses of a training, running or ended, with their rewards. Without --step: of the last step. JOB
may also be a run directory. The files are RUN/samples/*.parquet, which any reader of Parquet opens.
"""
IN_TERMINAL, IN_HTML = 10, 200


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser("samples", help="show prompts, responses and rewards", description=DESCRIPTION)
    add_job_argument(parser)
    parser.add_argument("--step", metavar="N", help="a step, a range such as 10-20, or all")
    parser.add_argument(
        "--split", choices=("train", "validation"), help="default: train; with --changed-since: validation, if there"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="those with the least reward first")
    order.add_argument("--best", action="store_true", help="those with the greatest reward first")
    order.add_argument(
        "--changed-since", metavar="N", type=int,
        help="prompts whose responses differ from those of step N, the greatest change of the reward first",
    )  # fmt: skip
    parser.add_argument(
        "--filter", dest="conditions", metavar="CONDITION", action="append", default=[],
        help="'reward<0.5', 'finish_reason=length', 'response~PATTERN'; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--number", type=int, metavar="N", help=f"how many (default {IN_TERMINAL}, with --html {IN_HTML})"
    )
    parser.add_argument("--whole", action="store_true", help="show long texts in full")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    parser.set_defaults(run=as_command("samples", show))


def show(options: argparse.Namespace) -> int:
    """Print samples, or write the page; return 0."""
    from rlmesh.rl.samples import pages, search
    from rlmesh.rl.samples.files import FOLDER, sample_files

    most = options.number if options.number is not None else IN_HTML if options.html else IN_TERMINAL
    if most < 1:
        raise UsageError(f"--number {most} must be ≥ 1")
    conditions = [search.parse_condition(text) for text in options.conditions]
    run_dir = _run_dir(options.job)
    check_run(run_dir)
    if (run_dir / FOLDER).exists():
        check_own(run_dir / FOLDER)
    since = options.changed_since
    if since is not None:
        if options.step is not None:
            raise UsageError("--changed-since compares with the last step: leave --step out")
        there = {file.split for file in sample_files(run_dir)}
        split = options.split or ("validation" if "validation" in there else None)
        changes = search.changed(search.chosen_files(run_dir, split, "all"), since, conditions)
        title, samples, texts = f"{len(changes)} prompts changed since step {since}", [], []
        changes = changes[:most]
        texts = [pages.change_as_text(one, whole=options.whole) for one in changes]
    else:
        files = search.chosen_files(run_dir, options.split, options.step)
        order: search.Order = "worst" if options.worst else "best" if options.best else "given"
        samples, changes = search.find(files, conditions, order, most), []
        steps = str(files[0].step) if len(files) == 1 else f"{files[0].step} to {files[-1].step}"
        title = f"{len(samples)} samples of {files[0].split}, step {steps}"
        texts = [pages.as_text(one, whole=options.whole) for one in samples]
    if options.html is None:
        # Samples are shown without masking of secrets: the words of a model are no settings.
        print(shown("\n\n".join([f"{run_dir}: {title}", *texts]), lines=True))
        return 0
    write_output(options.html, pages.as_html(f"{run_dir.name}: {title}", samples, changes))
    print(shown(f"{options.html}: {title}"))
    return 0


def _run_dir(job: str | None) -> Path:
    if job is not None and (Path(job) / "samples").is_dir():
        return Path(job)
    return Path(find_any(job).run_dir)

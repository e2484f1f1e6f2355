"""The options of ``sbatch`` that describe a job, and how to tell them from others on a command line. No I/O.

Names from the manual of Slurm 22.05 to 24.11, which tell a misspelt option and whether a value follows. An option that
is not among them, such as one of a newer Slurm, is passed through unchanged by ``--sbatch=--name=value``. Options that
make ``sbatch`` do something else than submit a script (``--help``, ``--wrap``, …) are left out on purpose.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh.errors import UsageError

__all__ = ["PASS_THROUGH", "SBATCH_OPTIONS", "Words", "first_words", "split_words"]

PASS_THROUGH = "--sbatch"
"""Option of ``rlmesh launch`` whose value is an option of ``sbatch``."""

_FLAGS = (
    "contiguous hold no-requeue oom-kill-step overcommit oversubscribe reboot requeue spread-job stepmgr use-min-nodes "
)
_VALUES = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint "
    "container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline "
    "delay-boot dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind "
    "gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name licenses "
    "mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist "
    "nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition "
    "power prefer priority profile qos reservation resv-ports segment signal sockets-per-node switches "
    "thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey "
)
_OPTIONAL = ("exclusive", "get-user-env", "nice", "no-kill", "propagate")
"""Options that take a value only after ``=``."""

SBATCH_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(_FLAGS.split(), "flag"),
    **dict.fromkeys(_VALUES.split(), "value"),
    **dict.fromkeys(_OPTIONAL, "optional"),
}

SHORT = {
    "A": "account", "a": "array", "b": "begin", "D": "chdir", "C": "constraint", "S": "core-spec",
    "c": "cpus-per-task", "d": "dependency", "m": "distribution", "e": "error", "x": "exclude", "B": "extra-node-info",
    "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "L": "licenses", "M": "clusters", "w": "nodelist",
    "F": "nodefile", "N": "nodes", "k": "no-kill", "n": "ntasks", "o": "output", "O": "overcommit",
    "s": "oversubscribe", "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, split.

    Attributes:
        sbatch: options for ``sbatch`` by their long names; a flag has no value.
        launch: options for ``rlmesh launch``, unchanged.
        job: the script and its arguments, without a ``--`` between them.
    """

    sbatch: Mapping[str, str | None]
    launch: tuple[str, ...]
    job: tuple[str, ...]


def split_words(words: Sequence[str], launch: Mapping[str, bool]) -> Words:
    """Split the words after ``rlmesh launch --slurm``.

    Args:
        launch: the options of ``rlmesh launch`` with their dashes, each with True if it takes a value. If both have an
            option of the same name, it is ``sbatch``'s.

    Raises:
        UsageError: an option is unknown to both (the error lists all options), or lacks its value.
    """
    sbatch: dict[str, str | None] = {}
    own: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = _name_of(word).partition("=")
        kind = SBATCH_OPTIONS.get(name)
        if kind is not None:
            if kind == "flag" and equals:
                raise UsageError(f"--{name} takes no value, but {word} gives one")
            if kind == "value" and not equals:
                value = _next(rest, word)
            sbatch[name] = value if equals or kind == "value" else None
            continue
        option = word.partition("=")[0]
        if option == PASS_THROUGH:
            passed = value if equals else _next(rest, word)
            name, equals, value = passed.removeprefix("--").partition("=")
            if not passed.startswith("--") or not name:
                raise UsageError(f"{PASS_THROUGH} {passed}: give a long option, as in {PASS_THROUGH}=--name=value")
            sbatch[name] = value if equals else None
            continue
        if option not in launch:
            raise _unknown(option, launch)
        own.append(word)
        if launch[option] and "=" not in word:
            own.append(_next(rest, word))
    if rest[:1] == ["--"]:
        rest.pop(0)
    job = rest[:1] + (rest[2:] if rest[1:2] == ["--"] else rest[1:])
    return Words(sbatch, tuple(own), tuple(job))


def first_words(words: Sequence[str], launch: Mapping[str, bool]) -> list[str]:
    """The options before the script, without their values; from the first unknown option on, all words."""
    rest = list(words)
    found: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, equals, _ = _name_of(rest[0]).partition("=")
        option = rest[0].partition("=")[0]
        if option not in launch and name not in SBATCH_OPTIONS:
            return found + rest
        found.append(rest.pop(0))
        if not equals and launch.get(option, SBATCH_OPTIONS.get(name) == "value"):
            del rest[:1]
    return found


def _name_of(word: str) -> str:
    """The long name, with ``=value`` if given that way; of a short option too: ``-N2``, ``-N=2``, ``-N``."""
    if word.startswith("--"):
        return word[2:]
    long = SHORT.get(word[1:2])
    if long is None:
        return word
    value = word[2:].removeprefix("=")
    return f"{long}={value}" if value else long


def _next(rest: list[str], option: str) -> str:
    if not rest or rest[0] == "--":
        raise UsageError(f"{option} needs a value")
    return rest.pop(0)


def _unknown(option: str, launch: Mapping[str, bool]) -> UsageError:
    known = [f"--{name}" for name in sorted(SBATCH_OPTIONS)]
    own = sorted(name for name in launch if name.startswith("--"))
    near = difflib.get_close_matches(option, [*known, *own], n=1)
    return UsageError(
        f"unknown option {option}." + (f" Did you mean {near[0]}?" if near else "") + "\n"
        f"Options of sbatch: {' '.join(known)}\n"
        f"Short ones: {' '.join(f'-{short}' for short in sorted(SHORT))}\n"
        f"Options of rlmesh launch: {' '.join(own)}\n"
        f"Any other option of sbatch: {PASS_THROUGH}=--name=value"
    )

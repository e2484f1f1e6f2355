"""Selection of samples: by step and conditions, the best or worst ones, and prompts that changed between steps."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlmesh.errors import UsageError
from rlmesh.rl.faults import did_you_mean
from rlmesh.rl.reading.steps import undone_steps
from rlmesh.rl.samples.files import FOLDER, SPLITS, Sampled, SampleFile, columns_in, read_file, sample_files

__all__ = ["ChangedPrompt", "Condition", "Order", "changed", "chosen_files", "find", "parse_condition"]

Order = Literal["worst", "best", "given"]
_CONDITION = re.compile(r"\s*(.+?)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one column, such as ``reward<0.5``, ``finish_reason=length`` or ``response~sorry``.

    Attributes:
        column: name of the column.
        sign: ``<``, ``<=``, ``>``, ``>=``, ``=``, ``!=``, or ``~`` (the text has a match of the regular expression).
        value: the value to compare with.
    """

    column: str
    sign: str
    value: str

    def holds(self, sample: Sampled) -> bool:
        """True if a sample meets the condition; one without a value in the column never does.

        Raises:
            UsageError: a number is compared with a text.
        """
        own = sample.get(self.column)
        if own is None:
            return False
        if self.sign == "~":
            return re.search(self.value, str(own)) is not None
        if isinstance(own, str):
            if self.sign not in ("=", "!="):
                raise UsageError(f"{self}: {self.column} is a text, which = != and ~ compare")
            return (own == self.value) == (self.sign == "=")
        try:
            return _NUMBERS[self.sign](own, float(self.value))
        except ValueError:
            raise UsageError(f"{self}: {self.column} is a number, {self.value!r} is none") from None

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{self.value}"


def parse_condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        UsageError: the text is no condition, or its regular expression is wrong.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no condition: write COLUMN<NUMBER, COLUMN=VALUE or COLUMN~PATTERN")
    column, sign, value = found.groups()
    if sign == "~":
        try:
            re.compile(value)
        except re.error as error:
            raise UsageError(f"{text!r}: {value!r} is no regular expression: {error}") from error
    return Condition(column, "=" if sign == "==" else sign, value)


def chosen_files(run_dir: Path, split: str | None = None, steps: str | None = None) -> list[SampleFile]:
    """The files of samples that a split and a range of steps select. Those of steps that the run has undone, since it
    went back to a checkpoint, are left out until the steps are made again.

    Args:
        run_dir: the run directory.
        split: ``None``: ``train`` if the run has it, else ``validation``.
        steps: ``12``, ``10-20`` or ``all``; ``None``: the last step.

    Raises:
        UsageError: there is no such file (the message says which steps exist), or ``steps`` has another form.
    """
    undone = undone_steps(run_dir)
    every = [one for one in sample_files(run_dir) if one.step not in undone]
    if not every:
        raise UsageError(
            f"{run_dir} has no samples: a Run keeps them in {run_dir / FOLDER} unless sample_files.every=0, "
            "if pyarrow is installed"
        )
    there = {one.split for one in every}
    chosen = split or next(one for one in SPLITS if one in there)
    own = [one for one in every if one.split == chosen]
    if not own:
        raise UsageError(f"{run_dir} has no samples of {chosen}, but of {', '.join(sorted(there))}")
    if steps is None:
        return own[-1:]
    if steps == "all":
        return own
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    if found is None:
        raise UsageError(f"step {steps!r}: write a number, a range such as 10-20, or all")
    first = int(found[1])
    last = int(found[2]) if found[2] else first
    if files := [one for one in own if first <= one.step <= last]:
        return files
    near = min(own, key=lambda one: abs(one.step - first)).step
    raise UsageError(
        f"there are no samples of {chosen} at step {steps}; there are {len(own)} steps from {own[0].step} to "
        f"{own[-1].step}, the nearest is {near}"
    )


def require_columns(conditions: Sequence[Condition], files: Sequence[SampleFile]) -> None:
    """Check that the column of each condition exists in a file.

    Raises:
        UsageError: a column does not exist; the message names the nearest right one.
    """
    columns = list(dict.fromkeys(name for file in files for name in columns_in(file))) if conditions else []
    for one in conditions:
        if one.column not in columns:
            meant = did_you_mean(one.column, columns, f"; there are {', '.join(columns)}")
            raise UsageError(f"{one}: samples have no column {one.column!r}{meant}")


def find(
    files: Sequence[SampleFile], conditions: Sequence[Condition] = (), order: Order = "given", most: int = 10
) -> list[Sampled]:
    """The samples that meet all conditions.

    Only one step and ``most`` samples are in memory at once.

    Args:
        files: the files to search.
        conditions: conditions that must all hold.
        order: ``worst``: the least reward first; ``best``: the greatest reward first. Both leave out samples without a
            reward.
        most: the largest number of samples to return.

    Raises:
        UsageError: a condition names no column.
    """
    require_columns(conditions, files)
    every = (one for file in files for one in read_file(file) if all(each.holds(one) for each in conditions))
    if order == "given":
        return [one for one, _ in zip(every, range(most), strict=False)]
    scored = (one for one in every if one["reward"] is not None)
    pick = heapq.nsmallest if order == "worst" else heapq.nlargest
    return pick(most, scored, key=lambda one: one["reward"])


@dataclass(frozen=True, slots=True)
class ChangedPrompt:
    """The samples of one prompt at two steps.

    Attributes:
        prompt: its text.
        before, after: the samples at the earlier and the later step.
    """

    prompt: str
    before: tuple[Sampled, ...]
    after: tuple[Sampled, ...]

    @property
    def gain(self) -> float:
        """The mean reward after minus that before; NaN if a step has no reward."""
        return _mean(self.after) - _mean(self.before)


def changed(files: Sequence[SampleFile], since: int, conditions: Sequence[Condition] = ()) -> list[ChangedPrompt]:
    """The prompts whose responses changed since a step, those with the greatest change of the mean reward first.

    Of each prompt, the last samples up to this step are compared with the last samples after it.

    Args:
        files: the files of one split, by step.
        since: the step.
        conditions: a prompt counts if one of its later samples meets all of them.

    Raises:
        UsageError: there is no step before or after ``since``, no prompt occurs in both, or a condition names no
            column.
    """
    early, late = [one for one in files if one.step <= since], [one for one in files if one.step > since]
    if not early or not late:
        steps = f"from {files[0].step} to {files[-1].step}" if files else "none"
        raise UsageError(f"samples of steps up to {since} and after it are needed; there are steps {steps}")
    require_columns(conditions, late)
    after = dict(_newest(late))
    before = dict(_newest(early, only=set(after)))
    if not before:
        raise UsageError(
            f"no prompt occurs both up to step {since} and after it: an epoch of training has each prompt once. "
            "Choose a step of an earlier epoch, or --split validation"
        )
    found = [ChangedPrompt(prompt, tuple(old), tuple(after[prompt])) for prompt, old in before.items()]
    found = [one for one in found if any(all(each.holds(s) for each in conditions) for s in one.after)]
    found = [one for one in found if _said(one.before) != _said(one.after)]
    return sorted(found, key=lambda one: -(abs(one.gain) if math.isfinite(one.gain) else -1.0))


def _newest(files: Sequence[SampleFile], only: set[str] | None = None) -> Iterator[tuple[str, list[Sampled]]]:
    """Each prompt with its samples in the last step that has the prompt."""
    seen: set[str] = set()
    for file in reversed(files):
        if only is not None and seen >= only:
            return
        here: dict[str, list[Sampled]] = {}
        for one in read_file(file):
            if one["prompt"] not in seen and (only is None or one["prompt"] in only):
                here.setdefault(one["prompt"], []).append(one)
        seen |= set(here)
        yield from here.items()


def _said(samples: Sequence[Sampled]) -> list[tuple[str, Any]]:
    return sorted((one["response"], str(one["reward"])) for one in samples)


def _mean(samples: Sequence[Sampled]) -> float:
    rewards = [one["reward"] for one in samples if one["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else float("nan")

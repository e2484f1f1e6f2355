"""Programs, scored by tests in a sandbox."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.rl.rewards.sandbox import Limits, Ran, Sandbox
from rlmesh.rl.types import Score

__all__ = ["compute_score", "program_of"]

FENCE, PYTHON = "```", ("", "py", "python", "python3")


@dataclass(frozen=True)
class _Test:
    """A test of a program: standard input and the right output, arguments and the right value, or code."""

    right: Any = None
    stdin: str = ""
    function: str = ""
    arguments: Sequence[Any] = ()
    code: str = ""

    def run(self, sandbox: Sandbox, program: str, wall_s: float, tolerance: float) -> tuple[Ran, bool]:
        """Run the program on the test: how it ended, and whether it passed."""
        if self.code:
            ran = sandbox.test(program, self.code, wall_s=wall_s)
            return ran, bool(ran.answer)
        if self.function:
            ran = sandbox.call(program, self.function, self.arguments, wall_s=wall_s)
            return ran, _same(ran.answer, self.right, tolerance)
        ran = sandbox.run(program, stdin=self.stdin, wall_s=wall_s)
        return ran, _same(ran.stdout.split(), self.right.split(), tolerance)


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    cpu_s: int = 4,
    total_s: float = 8.0,
    memory_bytes: int = 512 * 2**20,
    partial: bool = False,
    tolerance: float = 0.0,
    isolated: bool = True,
    paths: Sequence[str | Path] = (),
    score: float = 1.0,
) -> Score:
    """Run the program of a response on tests.

    The program is the last block of Python between fences (three backticks). The tests are a mapping or its JSON text:

    ===================================================  =============================================================
    ``{"inputs": [text], "outputs": [text]}``            the program reads standard input; its output is compared word
                                                         by word
    ``{"fn_name": name, "inputs": [[argument]],          the function, or the method of a class ``Solution``, is
    "outputs": [value]}``                                called; its value is compared as JSON
    ``{"tests": code}`` or a list of them, or the        code such as ``assert`` statements, which runs among the
    code or list alone                                   program's names
    ``{"test": code, "entry_point": name}``              the same, followed by ``check(name)``
    ===================================================  =============================================================

    Args:
        solution_str: the response.
        ground_truth: the tests.
        cpu_s: limit for the CPU time of each test, in whole seconds.
        total_s: time for all tests together. It must be below the ``timeout_s`` of the `Reward`: if the process pool
            ends the call first, the response is `Failed` instead of wrong.
        memory_bytes: memory limit of each test.
        partial: True: the score is the share of tests that pass. False: one failed test makes the score 0.
        tolerance: numbers differ by at most this, relative to the right one if that is above 1.
        isolated: False runs the program where the kernel does not allow isolation; it can then reach network and files.
        paths: folders of modules that programs may import, besides the standard library.
        score: the score of a right program.

    Returns:
        the score; the metric ``passed`` is the share of tests that pass; ``reason`` names the first that does not.

    Raises:
        UsageError: the kernel does not allow isolation.
        ValueError: the ground truth has no tests.
        RuntimeError: the sandbox failed.
    """
    tests = [*_tests(ground_truth)]
    with Sandbox(Limits(cpu_s=cpu_s, memory_bytes=memory_bytes), isolated=isolated, paths=paths) as sandbox:
        program = program_of(solution_str)
        if program is None:
            return Score(0.0, {"passed": 0.0}, "no program")
        deadline = time.monotonic() + total_s
        passed, reason = 0, ""
        for number, test in enumerate(tests):
            left_s = deadline - time.monotonic()
            ran, right = Ran("timeout", "", "", None, 0), False
            if left_s > 0:
                ran, right = test.run(sandbox, program, left_s, tolerance)
            if ran.status == "ok" and right:
                passed += 1
                continue
            what = {"ok": "wrong answer", "error": ran.stderr.rpartition("\n")[2][:200] or f"exit code {ran.code}"}
            reason = reason or f"test {number}: {what.get(ran.status, ran.status)}"
            if not partial or left_s <= 0:
                break
    share = passed / len(tests)
    return Score(score * (share if partial else float(share == 1)), {"passed": share}, reason)


def program_of(response: str) -> str | None:
    """The last block of Python between fences; ``None`` without one."""
    program: str | None = None
    block: list[str] | None = None
    language = ""
    for line in response.split("\n"):
        mark = line.strip()
        if block is None:
            if mark.startswith(FENCE):
                block, language = [], (mark[len(FENCE) :].split() or [""])[0].lower()
        elif mark == FENCE:
            program = "\n".join([*block, ""]) if language in PYTHON else program
            block = None
        else:
            block.append(line)
    return program


def _tests(truth: Any) -> Iterator[_Test]:
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise ValueError(f"the ground truth must be tests, and is no JSON: {error}") from error
    if isinstance(truth, Mapping):
        if "inputs" in truth:
            yield from _pairs(truth)
            return
        if "test" in truth:
            entry = truth.get("entry_point")
            truth = f"{truth['test']}\n" + (f"check({entry})\n" if entry else "")
        elif "tests" in truth:
            truth = truth["tests"]
    codes = [truth] if isinstance(truth, str) else truth
    if not isinstance(codes, Sequence) or not codes or not all(isinstance(one, str) and one.strip() for one in codes):
        raise ValueError(
            "the ground truth must be tests: code, a list of code, or a mapping with 'inputs' and 'outputs', 'tests' "
            f"or 'test'; got {str(truth)[:200]!r}"
        )
    yield from (_Test(code=code) for code in codes)


def _pairs(truth: Mapping[str, Any]) -> Iterator[_Test]:
    inputs, outputs, name = truth["inputs"], truth.get("outputs"), truth.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or not 0 < len(inputs) == len(outputs):
        raise ValueError("the ground truth must have as many 'outputs' as 'inputs', and at least one")
    for given, right in zip(inputs, outputs, strict=True):
        if not name:
            yield _Test(_text(right), stdin=_text(given))
        elif isinstance(given, Sequence) and not isinstance(given, str):
            yield _Test(right, function=str(name), arguments=given)
        else:
            raise ValueError(f"an input of {name} must be the list of its arguments, got {given!r:.80}")


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _same(found: Any, right: Any, tolerance: float) -> bool:
    """True if two values are the same as JSON; with a tolerance, numbers in them may differ, also within texts."""
    if isinstance(right, (list, tuple)):
        return (
            isinstance(found, list)
            and len(found) == len(right)
            and all(_same(a, b, tolerance) for a, b in zip(found, right, strict=True))
        )
    if isinstance(right, Mapping):
        keys = {str(key): value for key, value in right.items()}
        return (
            isinstance(found, dict)
            and set(found) == set(keys)
            and all(_same(found[key], value, tolerance) for key, value in keys.items())
        )
    if isinstance(right, bool) or isinstance(found, bool) or right is None:
        return type(found) is type(right) and bool(found == right)
    if found == right:
        return True
    if not tolerance or type(found) is dict or type(found) is list or isinstance(found, str) != isinstance(right, str):
        return False
    try:
        a, b = float(found), float(right)
    except (TypeError, ValueError, OverflowError):
        return False
    return math.isfinite(a) and abs(a - b) <= tolerance * max(1.0, abs(b))

"""The syntax of planned kills: target, point and signal, as text and as values. No I/O.

``TARGET@POINT``, where the target is ``ROLE:rank``, ``ROLE`` (the rank is drawn), ``master``, ``agent`` (of node 0) or
``agent:N``, and the point is one of::

    start               as soon as the target's process runs
    step=N              when a step of N or more was reported
    call=[ROLE.]METHOD  when METHOD begins at the target, or at the first member of ROLE
    shutdown            when the job begins to end
    after=SECONDS       SECONDS after the job began to run
    now                 at once

A suffix ``+SIGNAL`` sends that signal instead of SIGKILL: ``REWARD:0@step=5+STOP``. A seeded random plan is
``random:seed=7,kills=3,within=20``: 3 kills of drawn members within 20 seconds.
"""

from __future__ import annotations

import math
import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["Kill", "check_method", "parse_kill", "parse_kills"]

Point = Literal["start", "step", "call", "shutdown", "after", "now"]
POINTS: tuple[Point, ...] = ("start", "step", "call", "shutdown", "after", "now")
MASTER, AGENT = "master", "agent"
_ALONE = ("start", "shutdown", "now")
_TEXT = re.compile(r"(?P<target>[^@+]+)@(?P<point>[a-z]+)(=(?P<value>[^+]+))?(\+(?P<signal>[A-Za-z0-9]+))?")


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill.

    Attributes:
        target: a role, ``master`` or ``agent``.
        rank: rank of the member, or of the agent's node; None: to be drawn (agent: 0).
        point: kind of the moment.
        number: the step, or the seconds.
        role, method: the method whose call is awaited, for the point ``call``.
        signal: number of the signal to send.
    """

    target: str
    rank: int | None
    point: Point
    number: float = 0.0
    role: str = ""
    method: str = ""
    signal: int = int(signal.SIGKILL)

    @property
    def is_member(self) -> bool:
        return self.target not in (MASTER, AGENT)

    def __str__(self) -> str:
        rank = "" if self.rank is None else f":{self.rank}"
        value = {
            "step": f"={self.number:g}",
            "after": f"={self.number:g}",
            "call": f"={self.role}.{self.method}",
        }.get(self.point, "")
        how = "" if self.signal == signal.SIGKILL else f"+{signal.Signals(self.signal).name[3:]}"
        return f"{self.target}{rank}@{self.point}{value}{how}"

    def drawn(self, sizes: Mapping[str, int], source: random.Random) -> Kill:
        """Return the kill with a rank.

        Args:
            sizes: number of members of each of the job's roles.
            source: draws the rank if none is given.

        Raises:
            UsageError: the job has no such role or rank.
        """
        for role in (self.target, self.role):
            if role and role not in (MASTER, AGENT) and role not in sizes:
                raise UsageError(f"{self}: the job has no role {role!r}.{did_you_mean(role, sizes)}")
        if not self.is_member:
            return self if self.rank is not None else _with_rank(self, 0)
        size = sizes[self.target]
        if self.rank is None:
            return _with_rank(self, source.randrange(size))
        if self.rank >= size:
            raise UsageError(f"{self}: {self.target} has {size} members; ranks count from 0")
        return self


def parse_kill(text: str) -> Kill:
    """Parse one kill.

    Raises:
        UsageError: the text is not a kill; says what is wrong, with an example.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a kill: write TARGET@POINT, for example REWARD:0@step=5 or master@shutdown")
    target, rank = _target(found["target"], text)
    point, value = found["point"], found["value"]
    if point not in POINTS:
        raise UsageError(f"{text!r}: there is no point {point!r}.{did_you_mean(point, POINTS)}")
    if (value is None) != (point in _ALONE):
        raise UsageError(f"{text!r}: {point} needs {'no value' if value else 'a value, as in ' + point + '=5'}")
    number, role, method = 0.0, "", ""
    if point in ("step", "after"):
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"{text!r}: {value!r} is not a number") from None
        if not 0 <= number < math.inf:
            raise UsageError(f"{text!r}: {value!r} is never reached; write a number from 0 on")
    elif point == "call":
        role, _, method = value.rpartition(".")
        role = role or (target if target not in (MASTER, AGENT) else "")
        if not role:
            raise UsageError(f"{text!r}: say at whose call, as in {target}@call=ACTOR.save")
    return Kill(target, rank, point, number, role, method, _signal(found["signal"], text))


def check_method(kill: Kill, methods: Sequence[str]) -> None:
    """Check that a role exports the method at whose call a kill is planned.

    Raises:
        UsageError: it does not.
    """
    if kill.point == "call" and kill.method not in methods:
        near = did_you_mean(kill.method, methods)
        raise UsageError(f"{kill}: {kill.role} exports no method {kill.method!r}.{near}")


def parse_kills(texts: Sequence[str], sizes: Mapping[str, int]) -> list[Kill]:
    """Parse all kills of a job, and draw missing ranks.

    Raises:
        UsageError: a kill is not possible.
    """
    kills: list[Kill] = []
    for number, text in enumerate(texts):
        if text.startswith("random"):
            kills += _random_kills(text, sizes)
        else:
            kills.append(parse_kill(text).drawn(sizes, random.Random(f"{number}/{text}")))
    return kills


def _random_kills(text: str, sizes: Mapping[str, int]) -> list[Kill]:
    values = {"seed": 0.0, "kills": 1.0, "within": 30.0}
    for item in filter(None, text.partition(":")[2].split(",")):
        name, _, value = item.partition("=")
        try:
            if name not in values:
                raise UsageError(f"{text!r}: there is no {name!r}.{did_you_mean(name, values)}")
            values[name] = float(value)
        except ValueError:
            raise UsageError(f"{text!r}: {value!r} is not a number") from None
    if values["kills"] < 1 or values["kills"] != int(values["kills"]):
        raise UsageError(f"{text!r}: {values['kills']:g} kills are none; write a whole number of at least 1")
    if not 0 <= values["within"] < math.inf:
        raise UsageError(f"{text!r}: within {values['within']:g} s is not a time; write seconds from 0 on")
    source = random.Random(int(values["seed"]))
    members = [(role, rank) for role, size in sorted(sizes.items()) for rank in range(size)]
    chosen = [source.choice(members) for _ in range(int(values["kills"]))]
    times = sorted(source.uniform(0.0, values["within"]) for _ in chosen)
    return [Kill(*member, "after", round(at, 3)) for member, at in zip(chosen, times, strict=True)]


def _with_rank(kill: Kill, rank: int) -> Kill:
    return Kill(kill.target, rank, kill.point, kill.number, kill.role, kill.method, kill.signal)


def _target(text: str, whole: str) -> tuple[str, int | None]:
    name, colon, rank = text.partition(":")
    if colon and not rank.isdigit():
        raise UsageError(f"{whole!r}: {rank!r} is not a rank")
    return name, int(rank) if colon else None


def _signal(text: str | None, whole: str) -> int:
    if text is None:
        return int(signal.SIGKILL)
    if text.isdigit():
        if int(text) not in set(signal.Signals):
            raise UsageError(f"{whole!r}: there is no signal {text!r}")
        return int(text)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name not in signal.Signals.__members__:
        near = did_you_mean(name, signal.Signals.__members__)
        raise UsageError(f"{whole!r}: there is no signal {text!r}.{near}")
    return int(signal.Signals[name])

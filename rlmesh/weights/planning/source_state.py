"""Where a source stands, and whether a push may go on from there. Pure.

A process that restarts has lost what it had learnt. It comes back with its first weights, or with those of a
checkpoint, and says so when it offers them: ``send_weights(source, restored=12)``. Each commit leaves a note of who
sent (`Left`), in the `WeightSync` and in the sinks, so that a trainer that restarted finds it too. `check` compares the
two before a push over a new plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import SourceRestarted

HELP = (
    "Restore it from a checkpoint and say so, by send_weights(source, restored=VERSION) in the role; or call "
    "WeightSync.source_restored(VERSION) when you know at which version the source stands"
)


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank of a source, as it describes itself.

    Attributes:
        incarnation: how often the member was restarted.
        restored: the version that its weights were restored from; None: it said nothing.
        sent: the version that it sent last, since it started or was restored; None: none yet.
    """

    incarnation: int = 0
    restored: int | None = None
    sent: int | None = None

    def to_wire(self) -> list[Any]:
        return [self.incarnation, self.restored, self.sent]


@dataclass(frozen=True, slots=True)
class Left:
    """What the last commit left: its version, and the incarnation of each rank that sent it."""

    version: int
    ranks: Mapping[str, int]

    def to_wire(self) -> list[Any]:
        return [self.version, dict(self.ranks)]


@dataclass(frozen=True, slots=True)
class ConfirmedVersion:
    """The caller's word that the source stands at ``version``; it holds for these incarnations only."""

    version: int
    ranks: Mapping[str, int]


def left_of(notes: Sequence[Left], ranks: Mapping[str, Standing]) -> Left | None:
    """What the last commit left, from what sinks remember; where no sink does, from what the ranks themselves sent."""
    known = [note for note in notes if note.ranks.keys() & ranks.keys()]
    if known:
        return max(known, key=lambda note: note.version)
    sent = {name: rank for name, rank in ranks.items() if rank.sent is not None}
    if not sent:
        return None
    newest = max(rank.sent for rank in sent.values() if rank.sent is not None)
    return Left(newest, {name: rank.incarnation for name, rank in sent.items()})


def check(left: Left | None, ranks: Mapping[str, Standing], told: ConfirmedVersion | None, version: int) -> Left | None:
    """May these ranks send ``version``? Gives what counts as left from now on.

    They may if each is the process that sent last, or was restored from the version sent last. If all were restored
    from one other version, the push must show that the caller has gone back to it, or on from it: it brings that
    version, or one up to the version sent last, or what was restored is the newer of the two.

    Raises:
        SourceRestarted: they may not; names the ranks, and where each stands.
    """
    behind = {name: rank.restored for name, rank in ranks.items() if not _as_left(name, rank, left)}
    now = {name: rank.incarnation for name, rank in ranks.items()}
    if told is not None:
        said = {name: at for name, at in behind.items() if told.ranks.get(name) == now[name]}
        against = {name: at for name, at in said.items() if at is not None and at != told.version}
        if against:
            why = f"WeightSync.source_restored({told.version}) was called, but {_where(against)}"
            raise _refusal(left, against, ranks, version, why)
        behind = {name: at for name, at in behind.items() if name not in said}
        if not behind:
            return Left(told.version, now)
        left = Left(told.version, now)
    if not behind:
        return left
    if left is None:  # nobody remembers a push
        stand = {name: rank.restored for name, rank in ranks.items()}
        if len(set(stand.values())) > 1:
            raise _refusal(left, stand, ranks, version, f"its ranks stand at different versions: {_where(stand)}")
        return None
    versions = set(behind.values())
    if versions == {left.version}:
        return Left(left.version, now)
    whole = len(behind) == len(ranks)
    if None in versions or not whole or len(versions) > 1:
        others = [f"{name} is where the last push left it" for name in ranks if name not in behind]
        raise _refusal(left, behind, ranks, version, "; ".join((_where(behind), *others[:3])))
    at = next(at for at in versions if at is not None)
    if at <= version and (at >= left.version or version <= left.version):
        return Left(at, now)
    raise _refusal(left, behind, ranks, version, _where(behind), at)


def require_same(left: Left | None, version: int) -> None:
    """May the source give ``version`` once more?

    Raises:
        SourceRestarted: it was put to another version since, or the sinks were.
    """
    if left is None or left.version == version:
        return
    error = SourceRestarted(
        f"no sink can catch up with version {version}: the source stands at version {left.version}. Push what it has, "
        f"by push({left.version})"
    )
    error.version, error.sent = version, left.version
    raise error


def _as_left(name: str, rank: Standing, left: Left | None) -> bool:
    """Is it the process that sent last, and has not gone back since?"""
    if left is None:
        return rank.restored is None and rank.sent is None and rank.incarnation == 0
    known = left.ranks.get(name)
    if known is None:  # it had no part in it: whatever it has was not lost, if it has not restarted
        return rank.restored is None and rank.incarnation == 0
    return rank.incarnation == known and (rank.sent is not None or rank.restored is None)


def _where(behind: Mapping[str, int | None]) -> str:
    """``ACTOR:0 and ACTOR:1 were restored from version 8``."""
    groups: dict[int | None, list[str]] = {}
    for name, at in behind.items():
        groups.setdefault(at, []).append(name)
    told = []
    for at, names in groups.items():
        one = len(names) == 1
        if at is None:
            told.append(f"{_list(names)} {'does not say what it has' if one else 'do not say what they have'}")
        else:
            told.append(f"{_list(names)} {'was' if one else 'were'} restored from version {at}")
    return "; ".join(told)


def _list(names: Collection[str], most: int = 4) -> str:
    shown = [*names][:most]
    more = len(names) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]


def _refusal(
    left: Left | None, behind: Mapping[str, int | None], ranks: Mapping[str, Standing], version: int, why: str,
    at: int | None = None,
) -> SourceRestarted:  # fmt: skip
    if left is None:
        what = "the source was restored"
    else:
        new = [name for name in behind if ranks[name].incarnation != left.ranks.get(name)]
        what = f"{_list(new)} restarted" if new else f"{_list(list(behind))} went back"
    since = f" since version {left.version} was committed" if left is not None else ""
    advice = HELP
    if at is not None:
        advice = (
            f"Go on from there: push version {at} again, or train on from it and call "
            f"WeightSync.source_restored({at}) before the next push"
        )
    error = SourceRestarted(f"version {version} was not pushed: {what}{since}, and {why}. {advice}")
    error.version = version
    error.members = tuple(behind)
    error.sent = left.version if left is not None else None
    error.restored = dict(behind)
    return error

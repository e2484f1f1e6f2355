"""The version of a source's weights, and the check whether a push may continue from it. No I/O.

A process that restarts has lost its training since the last checkpoint. It starts with initial weights, or with those
of a checkpoint, and says so when it offers them: ``send_weights(source, restored=12)``. Each commit is recorded with
the ranks that sent it (`LastCommit`), in the `WeightSync` and in the sinks, so that a restarted trainer finds it too.
`check` compares the two before a push over a new plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlmesh.errors import SourceRestarted

HELP = (
    "Restore it from a checkpoint and say so, by send_weights(source, restored=VERSION) in the role; or call "
    "WeightSync.source_restored(VERSION) when you know at which version the source stands"
)


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank of a source, as the rank reports it.

    Attributes:
        incarnation: the number of the member's restarts.
        restored: the version that its weights were restored from; None: not reported.
        sent: the version that it sent last, since it started or was restored; None: none yet.
    """

    incarnation: int = 0
    restored: int | None = None
    sent: int | None = None


@dataclass(frozen=True, slots=True)
class LastCommit:
    """A committed version, and the incarnation of each rank that sent it."""

    version: int
    ranks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ConfirmedVersion:
    """The caller's statement that the source has ``version``; valid for these incarnations only."""

    version: int
    ranks: Mapping[str, int]


def last_commit_of(notes: Sequence[LastCommit], ranks: Mapping[str, RankState]) -> LastCommit | None:
    """The last commit, from the sinks' records, or else from the versions that the ranks themselves sent."""
    known = [note for note in notes if note.ranks.keys() & ranks.keys()]
    if known:
        return max(known, key=lambda note: note.version)
    sent = {name: rank for name, rank in ranks.items() if rank.sent is not None}
    if not sent:
        return None
    newest = max(rank.sent for rank in sent.values() if rank.sent is not None)
    return LastCommit(newest, {name: rank.incarnation for name, rank in sent.items()})


def check(
    last: LastCommit | None, ranks: Mapping[str, RankState], confirmed: ConfirmedVersion | None, version: int
) -> LastCommit | None:
    """Check that these ranks may send ``version``; returns the commit that counts as the last one from now on.

    They may if each is the process that sent last and has not gone back since, or was restored from the version sent
    last. They also may if all were restored from one other version r, with ``version`` ≥ r, and one of these holds:
    ``version`` ≤ the last commit (the caller went back to r), or r ≥ the last commit (the checkpoint is newer). If no
    commit is known, it is enough that all stand at the same version.

    A version that the caller has ``confirmed`` takes the place of the last commit, for the ranks that it names: a rank
    that was restored from another version contradicts it.

    Raises:
        SourceRestarted: they may not; names the ranks and the version of each.
    """
    behind = {name: rank.restored for name, rank in ranks.items() if not _is_as_last_sent(name, rank, last)}
    now = {name: rank.incarnation for name, rank in ranks.items()}
    if confirmed is not None:
        covered = {name: at for name, at in behind.items() if confirmed.ranks.get(name) == now[name]}
        contradicting = {name: at for name, at in covered.items() if at is not None and at != confirmed.version}
        if contradicting:
            why = f"WeightSync.source_restored({confirmed.version}) was called, but {_versions(contradicting)}"
            raise _refusal(last, contradicting, ranks, version, why)
        behind = {name: at for name, at in behind.items() if name not in covered}
        if not behind:
            return LastCommit(confirmed.version, now)
        last = LastCommit(confirmed.version, now)
    if not behind:
        return last
    if last is None:  # no push is recorded
        restored = {name: rank.restored for name, rank in ranks.items()}
        if len(set(restored.values())) > 1:
            why = f"its ranks stand at different versions: {_versions(restored)}"
            raise _refusal(last, restored, ranks, version, why)
        return None
    versions = set(behind.values())
    if versions == {last.version}:
        return LastCommit(last.version, now)
    all_behind = len(behind) == len(ranks)
    if None in versions or not all_behind or len(versions) > 1:
        others = [f"{name} is where the last push left it" for name in ranks if name not in behind]
        raise _refusal(last, behind, ranks, version, "; ".join((_versions(behind), *others[:3])))
    at = next(at for at in versions if at is not None)
    if at <= version and (at >= last.version or version <= last.version):
        return LastCommit(at, now)
    raise _refusal(last, behind, ranks, version, _versions(behind), at)


def require_same(last: LastCommit | None, version: int) -> None:
    """Check that the source still has ``version``.

    Raises:
        SourceRestarted: the source or the sinks were set to another version since.
    """
    if last is None or last.version == version:
        return
    error = SourceRestarted(
        f"no sink can catch up with version {version}: the source stands at version {last.version}. Push what it has, "
        f"by push({last.version})"
    )
    error.version, error.sent = version, last.version
    raise error


def _is_as_last_sent(name: str, rank: RankState, last: LastCommit | None) -> bool:
    """True if the rank is the process that sent last, and has not gone back since."""
    if last is None:
        return rank.restored is None and rank.sent is None and rank.incarnation == 0
    known = last.ranks.get(name)
    if known is None:  # not one of the ranks that sent last: fine unless it has restarted or was restored
        return rank.restored is None and rank.incarnation == 0
    return rank.incarnation == known and (rank.sent is not None or rank.restored is None)


def _versions(behind: Mapping[str, int | None]) -> str:
    """``ACTOR:0 and ACTOR:1 were restored from version 8``."""
    groups: dict[int | None, list[str]] = {}
    for name, at in behind.items():
        groups.setdefault(at, []).append(name)
    lines = []
    for at, names in groups.items():
        one = len(names) == 1
        if at is None:
            lines.append(f"{_list(names)} {'does not say what it has' if one else 'do not say what they have'}")
        else:
            lines.append(f"{_list(names)} {'was' if one else 'were'} restored from version {at}")
    return "; ".join(lines)


def _list(names: Collection[str], most: int = 4) -> str:
    shown = [*names][:most]
    more = len(names) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]


def _refusal(
    last: LastCommit | None, behind: Mapping[str, int | None], ranks: Mapping[str, RankState], version: int, why: str,
    at: int | None = None,
) -> SourceRestarted:  # fmt: skip
    if last is None:
        what = "the source was restored"
    else:
        new = [name for name in behind if ranks[name].incarnation != last.ranks.get(name)]
        what = f"{_list(new)} restarted" if new else f"{_list(list(behind))} went back"
    since = f" since version {last.version} was committed" if last is not None else ""
    advice = HELP
    if at is not None:
        advice = (
            f"Go on from there: push version {at} again, or train on from it and call "
            f"WeightSync.source_restored({at}) before the next push"
        )
    error = SourceRestarted(f"version {version} was not pushed: {what}{since}, and {why}. {advice}")
    error.version = version
    error.members = tuple(behind)
    error.sent = last.version if last is not None else None
    error.restored = dict(behind)
    return error

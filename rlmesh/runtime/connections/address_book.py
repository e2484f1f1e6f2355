"""The address book, which the master sends to every member, and the names of members and roles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.runtime.axes import Axes


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """The address of a member.

    ``endpoint`` is None until the member's process has bound one; calls to the member wait for that. In a job of
    several nodes, ``public`` is the endpoint for processes of other nodes. ``group`` is the member's group within its
    role.
    """

    role: str
    rank: int
    incarnation: int
    endpoint: str | None
    node_rank: int = 0
    pid: int = 0
    public: str = ""
    group: str = ""

    @property
    def name(self) -> str:
        return member_name(self.role, self.rank)


class MemberExit(Protocol):
    """The end of a member's process, as its agent reports it.

    Attributes:
        served: calls may have begun in the process.
        last_log_lines: the last lines of the member's log.
    """

    @property
    def role(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def hostname(self) -> str: ...
    @property
    def served(self) -> bool: ...
    @property
    def last_log_lines(self) -> tuple[str, ...]: ...

    def describe(self) -> str:
        """The way the process ended, such as ``exited with code 3``."""
        ...


@dataclass(frozen=True)
class AddressBook:
    """All members of a job; a higher ``version`` replaces a lower one.

    ``meshes`` are the axes of roles that declared axes. ``groups``: for each machine with several nodes, these nodes'
    ranks.
    ``elastic`` are the roles whose members restart together: their incarnation is the generation of the group.
    ``by_role`` has the members of each role by rank, ``by_name`` each member by its name, such as ``ACTOR:1``.
    """

    version: int
    members: tuple[MemberAddress, ...]
    meshes: tuple[tuple[str, Axes], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    elastic: tuple[str, ...] = ()
    by_role: dict[str, tuple[MemberAddress, ...]] = field(init=False, repr=False, compare=False, hash=False)
    by_name: dict[str, MemberAddress] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        by_role: dict[str, list[MemberAddress]] = {}
        for member in self.members:
            by_role.setdefault(member.role, []).append(member)
        ordered = {role: tuple(sorted(group, key=lambda m: m.rank)) for role, group in by_role.items()}
        object.__setattr__(self, "by_role", ordered)
        object.__setattr__(self, "by_name", {member.name: member for member in self.members})

    def seen_from(self, node_rank: int) -> AddressBook:
        """The book with the addresses that a process of a node uses; -1 for a process outside the job's nodes."""
        near = next((group for group in self.groups if node_rank in group), (node_rank,))
        if all(not member.public or member.node_rank in near for member in self.members):
            return self
        members = tuple(
            replace(member, endpoint=member.public, public="")
            if member.public and member.node_rank not in near
            else member
            for member in self.members
        )
        return AddressBook(self.version, members, self.meshes, self.groups, self.elastic)

    def roles(self) -> tuple[str, ...]:
        return tuple(self.by_role)

    def is_elastic(self, role: str) -> bool:
        """True if the members of a role are one group, which restarts as a whole."""
        return role in self.elastic

    def role(self, name: str) -> tuple[MemberAddress, ...]:
        """The members of a role, by rank.

        Raises:
            RoleNotFound: there is no such role; the text names the job's roles.
        """
        found = self.by_role.get(name)
        if found is None:
            import difflib

            near = difflib.get_close_matches(name.upper(), [r.upper() for r in self.by_role], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(sorted(self.by_role)) or "none"
            raise RoleNotFound(f"this job has no role {name!r} (its roles: {known}){hint}")
        return found

    def group(self, role: str, name: str) -> tuple[MemberAddress, ...]:
        """The members of a group within a role, by rank.

        Raises:
            RoleNotFound: there is no such group; the text names the role's groups.
        """
        members = self.role(role)
        found = tuple(member for member in members if member.group == name)
        if found:
            return found
        known = list(dict.fromkeys(member.group for member in members if member.group))
        if not known:
            raise RoleNotFound(f"{role} has no group {name!r} and no other group: .with_groups({name}=…) makes groups")
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RoleNotFound(f"{role} has no group {name!r} (its groups: {', '.join(known)}){hint}")

    def axes(self, role: str) -> Axes:
        """The axes of a role.

        Raises:
            RoleNotFound: there is no such role.
            UsageError: the role declared no axes.
        """
        self.role(role)
        for name, axes in self.meshes:
            if name == role:
                return axes
        raise UsageError(f"{role} has no axes: declare them on the role, for example .mesh(dp=2, tp=4)")

    def find(self, role: str, rank: int) -> MemberAddress | None:
        return self.by_name.get(member_name(role, rank))


def role_name(role: object) -> str:
    """A role's name from its name, an enum member such as ``RLRoleType.ACTOR``, or a class (upper case)."""
    if isinstance(role, str):
        return role
    if isinstance(role, Enum):
        return role.name
    if isinstance(role, type):
        return role.__name__.upper()
    raise UsageError(f"RoleGroup({role!r}): pass the role's name or RLRoleType member")


def member_name(role: str, rank: int) -> str:
    """The name of a member: ``ACTOR:1``."""
    return f"{role}:{rank}"


def split_name(name: str) -> tuple[str, int | None]:
    """Split ``ACTOR:1`` into (``ACTOR``, 1); a control object such as ``@master`` has no rank."""
    role, separator, rank = name.rpartition(":")
    return (role, int(rank)) if separator and rank.isdigit() else (name, None)

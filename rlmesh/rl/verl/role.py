"""`Role`: the parts of a PPO training, by the names of verl's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmesh.errors import UsageError

__all__ = ["Role"]


class _Roles(type):
    """Turns the numbers in a class body into members, as Enum does, but allows subclasses of a class with members."""

    _own: dict[str, Role]

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _Roles:
        numbers = {key: value for key, value in body.items() if key[0] != "_" and isinstance(value, int)}
        made = super().__new__(mcs, name, bases, {key: body[key] for key in body.keys() - numbers.keys()})
        made._own = {}
        for key, value in numbers.items():
            made._add(key, value)
        return made

    def _add(cls, name: str, value: int) -> Role:
        if name in cls.names():
            raise UsageError(f"{cls.__name__} has a role {name!r} already")
        member: Role = object.__new__(cls)  # type: ignore[arg-type]  # `Role(…)` looks up a member
        member.name, member.value = name, value
        cls._own[name] = member
        setattr(cls, name, member)
        return member

    def names(cls) -> dict[str, Role]:
        """The members by name, those of the base classes first."""
        return {name: role for base in reversed(cls.__mro__) for name, role in getattr(base, "_own", {}).items()}

    def __iter__(cls) -> Iterator[Role]:
        return iter(cls.names().values())

    def __len__(cls) -> int:
        return len(cls.names())

    def __getitem__(cls, name: str) -> Role:
        return cls.names()[name]

    def __call__(cls, value: int) -> Role:
        """The member with this number.

        Raises:
            ValueError: there is none.
        """
        for role in cls:
            if role.value == value:
                return role
        raise ValueError(f"{value!r} is no {cls.__name__}: there are {', '.join(cls.names())}")


class Role(metaclass=_Roles):
    """A part of a training that workers carry out. It has a ``name`` and a ``value``, like a member of an Enum.

    Add roles by ``Role.extend("Teacher")``, or in a class that inherits from this one::

        class MyRole(Role):
            Teacher = 7
    """

    name: str
    value: int

    Actor: Role = 0  # type: ignore[assignment]
    Rollout: Role = 1  # type: ignore[assignment]
    ActorRollout: Role = 2  # type: ignore[assignment]
    Critic: Role = 3  # type: ignore[assignment]
    RefPolicy: Role = 4  # type: ignore[assignment]
    RewardModel: Role = 5  # type: ignore[assignment]
    ActorRolloutRef: Role = 6  # type: ignore[assignment]

    @classmethod
    def extend(cls, name: str) -> Role:
        """Add a role of this name, and return it; ``Role[name]`` gives it later.

        Raises:
            UsageError: there is one already, or the name is no identifier.
        """
        if not str(name).isidentifier():
            raise UsageError(f"Role.extend({name!r}): the name of a role is an identifier, such as 'Teacher'")
        return cls._add(name, max(role.value for role in cls) + 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Role) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _role, (type(self), self.name, self.value)


def _role(kind: _Roles, name: str, value: int) -> Role:
    """The role of this name; it is added if this process has not called `Role.extend` for it."""
    known = kind.names()
    return known[name] if name in known else kind._add(name, value)

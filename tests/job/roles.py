"""Roles for the tests of job descriptions. Never run, only looked up."""

from __future__ import annotations

from rlmesh import BaseRLTrainer, BaseRLWorkload


class Plain:
    """No base class, no run()."""


class Runner:
    def run(self) -> None: ...


class Child(Runner):
    """Its run() is inherited."""


class Trainer(BaseRLTrainer):
    def fit(self) -> None: ...


class Actor(BaseRLWorkload):
    """rlmesh's own base has no run()."""


class NeedsArguments:
    def __init__(self, config: dict[str, int], *, lr: float, seed: int = 0) -> None: ...


class TakesDefaults:
    def __init__(self, seed: int = 0) -> None: ...

    def run(self) -> None: ...


def main() -> None: ...


def main_with_arguments(path: str) -> None: ...


SETTINGS = {"lr": 1.0}


class Outer:
    class Inner: ...

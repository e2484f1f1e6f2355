"""What the stubs of actor, critic, reference and reward have in common."""

from __future__ import annotations

from typing import Any

from rlmesh import current_worker

from . import remote_call  # noqa: F401  (its functions name the methods)


class ModelRole:
    """Counts what it was asked to do."""

    strategy: Any = None
    model_path = ""
    ended = False

    def init_model(self, strategy: Any, model_path: str) -> str:
        self.strategy, self.model_path = strategy, model_path
        return current_worker().name

    def require_init(self) -> None:
        assert self.model_path, f"{current_worker().name} was used before its init"

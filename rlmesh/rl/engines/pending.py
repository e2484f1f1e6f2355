"""`PendingSample`: a requested response, whose caller may give it up."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import Sample

__all__ = ["GivenUp", "PendingSample", "SampleFuture"]


class GivenUp:
    """A flag that is set while the engine still has requests that were given up."""

    def __init__(self) -> None:
        self.some = False


class SampleFuture(Future[Sample]):
    """The future of a response, which sets a flag when it is cancelled: checking all futures at each token would be
    slow."""

    def __init__(self, given_up: GivenUp) -> None:
        super().__init__()
        self._given_up = given_up

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._given_up.some |= cancelled
        return cancelled


@dataclass(eq=False)
class PendingSample:
    """A requested response and its future."""

    growing: Growing
    future: Future[Sample]

    def finish(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.growing.sample())

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

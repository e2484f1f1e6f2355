"""`PendingSample`: a response that somebody waits for, and that can be given up."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import Sample

__all__ = ["GivenUp", "PendingSample", "SampleFuture"]


class GivenUp:
    """True while requests were given up that the engine has not dropped yet."""

    def __init__(self) -> None:
        self.some = False


class SampleFuture(Future[Sample]):
    """A response to come, which says when it is given up: asking each of many futures at each token takes long."""

    def __init__(self, given_up: GivenUp) -> None:
        super().__init__()
        self._given_up = given_up

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._given_up.some |= cancelled
        return cancelled


@dataclass(eq=False)
class PendingSample:
    """A response that somebody waits for."""

    growing: Growing
    future: Future[Sample]

    def finish(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.growing.sample())

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

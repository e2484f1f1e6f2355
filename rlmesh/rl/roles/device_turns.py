"""`DeviceTurns`: the parts of a process that use its devices one at a time, such as a training and a rollout engine.

A part is awake if its weights and state are on the device, and asleep if they are not. Roles that share devices with
other roles take a device lease for each turn (`rlmesh.WorkerContext.device_lease`), and put their parts to sleep before
they return it. So at most one part of all processes on a device is awake. A role that does not share its devices needs
no lease; its parts sleep only while another one of them is awake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlmesh import DeviceLease, current_worker, rpc
from rlmesh.rl.roles.kernel_stacks import shrink_kernel_stacks

__all__ = ["DeviceTurns", "TakesTurns"]


class DeviceTurns:
    """The parts of this process.

    Args:
        leased: True if other processes use the devices too.

    Attributes:
        awake: the part that is awake; ``None``: all sleep.
    """

    def __init__(self, *, leased: bool) -> None:
        self.leased = leased
        self.awake: str | None = None
        self._parts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        self._held: DeviceLease | None = None

    @classmethod
    def here(cls) -> DeviceTurns:
        """The turns of this worker: leased if other roles share its devices."""
        return cls(leased=len(current_worker().collocated_roles) > 1)

    def lease(self) -> AbstractContextManager[object]:
        """A block in which no other process uses the devices. Make parts within such a block."""
        return current_worker().device_lease(sleep=self.sleep) if self.leased else nullcontext()

    def add(self, name: str, *, wake: Callable[[], object], sleep: Callable[[], object]) -> None:
        """Add a part that has just been made, and is awake."""
        self._parts[name] = wake, sleep
        self.awake = name
        if self.leased:
            shrink_kernel_stacks()  # each process that shares the devices keeps some of their memory all the time

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """A block in which this part is awake, and no other."""
        with self.lease():
            if self.awake != name:
                self.sleep()
                self._parts[name][0]()
                self.awake = name
            yield

    def sleep(self) -> None:
        """Put the part that is awake to sleep."""
        if self.awake is not None:
            self._parts[self.awake][1]()
            self.awake = None

    def hold(self) -> None:
        """Keep the devices until `release`, so that the turns in between need no new lease. May be called twice."""
        if self.leased and self._held is None:
            lease = current_worker().device_lease(sleep=self.sleep)
            lease.__enter__()
            self._held = lease

    def release(self) -> None:
        """Return the devices that `hold` took; does nothing without them."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


class TakesTurns:
    """A role that may share its devices. The trainer decides how long it keeps them."""

    turns: DeviceTurns

    def make_turns(self) -> DeviceTurns:
        """Make the turns of this member. Override this to observe them."""
        return DeviceTurns.here()

    @rpc
    def shares_devices(self) -> bool:
        """True if other roles use this member's devices."""
        return self.turns.leased

    @rpc
    def hold_devices(self) -> None:
        """Keep the devices until `release_devices`."""
        self.turns.hold()

    @rpc
    def release_devices(self) -> None:
        """Return the devices to the other roles, if this role holds them."""
        self.turns.release()

"""`IncomingCall`: a call on its way through the process that serves it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rlmesh.errors import CallError, PeerLost, SlotGone
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.call_context import CallContext
from rlmesh.runtime.serving.served_objects import Method
from rlmesh.wire import codec
from rlmesh.wire.envelope import Call, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.future_arguments import ArgumentResolver
    from rlmesh.runtime.serving.stream_server import Outflow


class IncomingCall:
    """A call that arrived, until its reply left."""

    # One is made per call: what most calls never change are defaults of the class.
    started_ns = 0
    exit: SystemExit | None = None
    cancelled = False
    task: asyncio.Task[Any] | None = None
    outflow: Outflow | None = None
    passed: ArgumentResolver | None = None
    keep = False
    refused = False
    hands_over = False
    """Whoever runs it takes the next call of its method as well."""
    following: IncomingCall | None = None

    def __init__(self, channel: Channel, call: Call, frames: Frames, method: Method, run_queue_ns: int) -> None:
        self.channel, self.call, self.frames, self.method = channel, call, frames, method
        self.run_queue_ns = run_queue_ns
        self.received_ns = self.ready_ns = time.perf_counter_ns()
        chain = (*call.chain, method.slot) if method.serial else call.chain
        self.context = CallContext(chain, clock.now() + call.timeout_s)
        self.key = (channel.link, call.call_id)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode them; once."""
        call = self.call
        self.refused = True
        # Let go of now: what cannot be decoded must not hold its sender's memory until the next call comes.
        frames, self.frames = self.frames, []
        try:
            if self.passed is None:
                args, kwargs = codec.decode(frames)
            else:
                args, kwargs = self.passed.decode(frames)
        except CallError:
            raise
        except SlotGone as error:
            role, rank = split_name(call.target)
            raise PeerLost(
                f"the arguments of {call.target}.{call.method}() cannot be read by {call.target}: {error}",
                role=role, rank=rank, method=call.method, executed="no",
            ) from error  # fmt: skip
        except BaseException as error:  # Of an argument's own code; none of it ends this process.
            role, rank = split_name(call.target)
            raise CallError(
                f"the arguments of {call.target}.{call.method}() cannot be decoded by {call.target}: "
                f"{type(error).__name__}: {error}. Is the same code importable there?",
                role=role, rank=rank, method=call.method, executed="no",
            ) from error  # fmt: skip
        self.passed = None
        self.refused = False
        return args, kwargs

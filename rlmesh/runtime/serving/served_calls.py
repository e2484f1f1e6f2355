"""What a process was asked and has not ended, as people are told of it."""

from __future__ import annotations

from rlmesh.runtime.calling.peer_status import Serving
from rlmesh.runtime.serving.incoming import IncomingCall
from rlmesh.wire.envelope import Flag

__all__ = ["is_shown", "serving_of"]

_NO_REPLY = int(Flag.NO_REPLY)


def is_shown(incoming: IncomingCall) -> bool:
    """Not so for a call that was cancelled before it began: it only waits for its turn to be dropped."""
    return not incoming.context.over and (incoming.started_ns > 0 or not incoming.cancelled)


def serving_of(incoming: IncomingCall, now_ns: int) -> Serving:
    """One call; one that runs counts from its start."""
    runs = incoming.started_ns > 0 and not (incoming.outflow is not None and incoming.outflow.waits)
    unawaited = ""
    if incoming.call.flags & _NO_REPLY:
        unawaited = "nobody waits for a notification"
    elif incoming.cancelled:
        unawaited = "its call was cancelled or timed out"
    since_ns = incoming.started_ns or incoming.received_ns
    method = f"{incoming.call.target}.{incoming.call.method}"
    return Serving(method, (now_ns - since_ns) / 1e9, incoming.channel.peer_name, runs, unawaited)

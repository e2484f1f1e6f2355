"""This machine as one node of a multi-node job: as the head that runs the script, or as a node that joins it.

Every way of launching ends here, once on each node: by hand, over ssh, under Slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import rlmesh
from rlmesh.errors import LaunchError, UsageError
from rlmesh.rendezvous.client import NodeOptions, join_and_serve
from rlmesh.rendezvous.server import RendezvousOptions, RendezvousServer, host_name
from rlmesh.rendezvous.state import ANY_RANK
from rlmesh.runtime.transport.inet import is_local, join_host_port, resolve

__all__ = ["NodePlace", "is_head", "run_node"]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node of a job that this process becomes, and where the nodes come together.

    Attributes:
        least, most: number of nodes with which the job starts; equal unless fewer are enough.
        host, port: of the head; host is a name or an address without brackets. With port 0 on the head the system
            chooses a port, which `run_node` passes to ``announce``.
        key: the secret that all nodes share.
        node_rank: 0 is the head; None: the head if ``host`` is this machine and nobody listens there yet, else the
            lowest free rank.
        join_s: seconds for the nodes to come together.
        last_call_s: seconds to wait for more nodes once ``least`` are there.
        name: name of this node in messages; by default the host's.
        host_here: the numeric address to advertise for this node, if the system's choice is not right.
        lifeline: a descriptor whose end of file ends this node.
        group: nodes of the same group are one machine, so that their processes share its memory and sockets.
    """

    least: int
    most: int
    host: str
    port: int
    key: bytes = field(repr=False)
    node_rank: int | None = None
    join_s: float = 600.0
    last_call_s: float = 30.0
    name: str = ""
    host_here: str = ""
    lifeline: int | None = None
    group: str = ""


def is_head(place: NodePlace) -> bool | None:
    """True if this process is the head; None if it must try to listen to find out."""
    if place.node_rank is not None:
        return place.node_rank == 0
    try:
        here = any(is_local(address) for address in resolve(place.host))
    except OSError:
        here = False
    return None if here else False


def run_node(
    place: NodePlace,
    run_script: Callable[[RendezvousServer], int],
    announce: Callable[[str], None] = lambda endpoint: None,
) -> int:
    """Run one node of a job until it is over; return the exit code.

    Args:
        run_script: runs the script that submits jobs, on the head only; returns the exit code of ``launch``.
        announce: takes the head's endpoint once it listens.

    Raises:
        LaunchError: the nodes did not come together; says which are there and which are missing.
        AuthenticationFailed: the head has another key.
        UsageError: the numbers contradict each other.
    """
    if not 1 <= place.least <= place.most or (place.node_rank or 0) >= place.most:
        raise UsageError(f"node rank {place.node_rank} of {place.least} to {place.most} nodes cannot be")
    head = is_head(place)
    if head is not False:
        try:
            opened = RendezvousServer(_head_options(place))
        except LaunchError:
            if head:
                raise
        else:
            return _be_head(opened, run_script, announce)
    if place.port == 0:
        raise UsageError(
            f"{join_host_port(place.host, 0)}: with port 0 the system chooses one for node 0, which prints it; the "
            "other nodes are given that one, or all nodes a port of your choice"
        )
    return join_and_serve(_node_options(place))


def _be_head(
    head: RendezvousServer, run_script: Callable[[RendezvousServer], int], announce: Callable[[str], None]
) -> int:
    with head:
        announce(head.endpoint)
        code = run_script(head)
        head.close(code, "" if code == 0 else "the head's script ended with an error")
        return code


def _head_options(place: NodePlace) -> RendezvousOptions:
    return RendezvousOptions(
        least=place.least, most=place.most, host=place.host, port=place.port, key=place.key,
        version=rlmesh.__version__, timeout_s=place.join_s, last_call_s=place.last_call_s,
        name=place.name or host_name(), host_here=place.host_here, group=place.group,
    )  # fmt: skip


def _node_options(place: NodePlace) -> NodeOptions:
    return NodeOptions(
        host=place.host, port=place.port, key=place.key, version=rlmesh.__version__,
        node_rank=ANY_RANK if place.node_rank is None else place.node_rank,
        nnodes=place.most if place.least == place.most else 0, timeout_s=place.join_s, name=place.name,
        host_here=place.host_here, lifeline=place.lifeline, group=place.group,
    )  # fmt: skip

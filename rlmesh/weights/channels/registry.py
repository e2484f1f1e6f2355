"""Which module has which channel; loaded when it is used, since some need torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlmesh.weights.channels.base import ChannelReceiver, ChannelSender, RouteSettings
from rlmesh.weights.planning.plan import Channel

_MODULES: Mapping[Channel, str] = {
    "shm": "rlmesh.weights.channels.shm",
    "cuda_ipc": "rlmesh.weights.channels.cuda_ipc",
    "collective": "rlmesh.weights.channels.collective",
    "stream": "rlmesh.weights.channels.tcp_stream",
}


def open_outlet(channel: Channel, settings: RouteSettings) -> ChannelSender:
    outlet: ChannelSender = import_module(_MODULES[channel]).open_outlet(settings)
    return outlet


def open_inlet(channel: Channel, settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> ChannelReceiver:
    inlet: ChannelReceiver = import_module(_MODULES[channel]).open_inlet(settings, sink, info)
    return inlet

"""What a member's environment says about its devices. Pure. rlmesh alone sets these variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmesh.placement.demand import DeviceType
from rlmesh.placement.machine.gpus import BY_BUS, CUDA_MASK, CUDA_ORDER
from rlmesh.placement.machine.inventory import VIRTUAL, Device


def device_environment(
    devices: Sequence[Device], of_node: Sequence[Device], device_type: DeviceType, own: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a member that was given ``devices`` on a node that has ``of_node``.

    A member with devices sees these and no others, named by UUID, and numbers count by bus id. One without sees
    none, unless the role's own variables (``own``) say otherwise: it does not take part in the division. Virtual
    slots name no device: the members of a job of device type CPU see none, others what the node has.
    """
    if any(device.kind != VIRTUAL for device in devices):
        return {CUDA_MASK: ",".join(device.uuid for device in devices), CUDA_ORDER: BY_BUS}
    hides = device_type == "CPU" or any(device.kind != VIRTUAL for device in of_node)
    return {CUDA_MASK: ""} if hides and CUDA_MASK not in own else {}


def mask_disagrees(devices: Sequence[Device], env: Mapping[str, str]) -> str:
    """How a mask differs from the one that a member was given; empty if it doesn't, or if none was given."""
    if not devices or all(device.kind == VIRTUAL for device in devices):
        return ""
    wanted = ",".join(device.uuid for device in devices)
    found = env.get(CUDA_MASK)
    return "" if found == wanted else f"the plan set {CUDA_MASK}={wanted}, and it is {found!r}"

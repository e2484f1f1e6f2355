"""Environment variables of a member for its devices. No I/O. Only rlmesh sets these variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmesh.placement.demand import DeviceType
from rlmesh.placement.machine.gpus import BY_BUS, CUDA_MASK, CUDA_ORDER
from rlmesh.placement.machine.inventory import VIRTUAL, Device


def device_environment(
    devices: Sequence[Device], of_node: Sequence[Device], device_type: DeviceType, own: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a member that was given ``devices`` on a node with the devices ``of_node``.

    A member with devices sees only these, named by UUID and numbered by bus id. A member without devices sees
    none, unless the role's own variables (``own``) set a mask: it does not take part in the division. Virtual
    slots name no device: in a job of device type CPU the members see none, in other jobs all devices of the node.
    """
    if any(device.kind != VIRTUAL for device in devices):
        return {CUDA_MASK: ",".join(device.uuid for device in devices), CUDA_ORDER: BY_BUS}
    hides = device_type == "CPU" or any(device.kind != VIRTUAL for device in of_node)
    return {CUDA_MASK: ""} if hides and CUDA_MASK not in own else {}


def mask_disagrees(devices: Sequence[Device], env: Mapping[str, str]) -> str:
    """Describe how a mask differs from the planned one; empty if it does not, or if none was planned."""
    if not devices or all(device.kind == VIRTUAL for device in devices):
        return ""
    wanted = ",".join(device.uuid for device in devices)
    found = env.get(CUDA_MASK)
    return "" if found == wanted else f"the plan set {CUDA_MASK}={wanted}, and it is {found!r}"

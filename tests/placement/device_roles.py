"""Roles that tell what they see of their devices."""

from __future__ import annotations

import json
import os
from typing import Any

from rlmesh import RoleGroup, current_worker, rpc


def seen() -> dict[str, Any]:
    worker = current_worker()
    return {
        "name": worker.name,
        "group": worker.group,
        "together": sorted(worker.collocated_roles),
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "cpus": sorted(os.sched_getaffinity(0)),
    }


class Seer:
    @rpc
    def see(self) -> dict[str, Any]:
        return seen()


class Meddler(Seer):
    """Its code sets the mask by itself, as many scripts do."""

    def __init__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


class Collector:
    """Writes what all members of the roles in the job's configuration see to ``seen.json``."""

    def run(self) -> None:
        roles = current_worker().job_info.user_config["roles"]
        found = [seen(), *(s for role in roles for s in RoleGroup[Any](role).call("see").result())]
        path = current_worker().run_dir / "seen.json"
        path.write_text(json.dumps({s["name"]: s for s in found}))

"""Several virtual nodes on one machine.

::

    with LocalCluster(nodes=3, devices_per_node=2):
        job.submit("test")

Each node is a real agent under a real guardian, with its own sockets and members. Devices are virtual slots, which
placement counts and assigns like real devices, for jobs of device type CPU and GPU alike. They do not hide GPUs: on a
machine that has some, each member sees all of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import get_args

from rlmesh.driver.options import Ambient, Cluster, LaunchOptions, ambient
from rlmesh.master.jobspec import TimeLimits
from rlmesh.observe.views.live import ViewMode
from rlmesh.runtime.argument_types import require, require_choice, require_number

END_S = 15.0


class LocalCluster:
    """Runs the jobs that are submitted inside its ``with`` block on virtual nodes; nothing of them is left on exit.

    No report is drawn for these jobs.

    Args:
        nodes: number of nodes.
        devices_per_node: virtual accelerators of each node.
        view: view of jobs for which ``submit`` sets none.
        run_root: folder for the jobs' run directories; ``runs`` if not given.
        limits: deadlines of the jobs' phases.
        nvml: ``module:attribute`` of a :class:`FakeNvml`, whose GPUs every node has instead of virtual slots.
    """

    def __init__(
        self, nodes: int = 1, devices_per_node: int = 8, *, view: ViewMode = "none",
        run_root: Path | None = None, limits: TimeLimits | None = None, nvml: str = "",
    ) -> None:  # fmt: skip
        require_number("LocalCluster(nodes=…)", nodes, 1, 1000)
        require_number("LocalCluster(devices_per_node=…)", devices_per_node, 0, 10_000)
        require("LocalCluster(run_root=…)", run_root, str | Path | None, "the path of a folder")
        require("LocalCluster(limits=…)", limits, TimeLimits | None, "TimeLimits")
        require("LocalCluster(nvml=…)", nvml, str, "module:attribute")
        require_choice("LocalCluster(view=…)", view, get_args(ViewMode))
        names = tuple(f"node-{rank}" for rank in range(nodes))
        self.cluster = Cluster(names, None if nvml else devices_per_node, nvml=nvml)
        self._options = LaunchOptions(
            view=view,
            cluster=self.cluster,
            run_root=Path(run_root) if run_root is not None else None,
            report=False,
            limits=limits or TimeLimits(),
        )
        self._stack = ExitStack()
        self._jobs: Ambient | None = None

    def __enter__(self) -> LocalCluster:
        self._jobs = self._stack.enter_context(ambient(self._options, yields=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._jobs is not None:
                for job in self._jobs.jobs:
                    job.stop("the LocalCluster was closed")
                for job in self._jobs.jobs:
                    job.wait_ended(END_S)
        finally:
            self._stack.close()

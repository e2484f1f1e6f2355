"""What the first use of CUDA leaves in a process, descriptors and mappings, is there before the first test looks."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def what_cuda_keeps(leak_check: object) -> None:
    """After the session has its own /dev/shm, in which the driver puts what it shares of events: processes that open
    them must find it there."""
    if not torch.cuda.is_available():
        return
    torch.cuda.init()
    torch.ones(1 << 20, device="cuda").sum().item()
    event = torch.cuda.Event(interprocess=True)
    event.record()
    event.ipc_handle()
    torch.cuda.synchronize()
    # Triton's compiler, and the driver's own functions.
    from rlmesh.memory.cuda_driver import driver
    from rlmesh.weights.cuda.copies import copy

    some = torch.ones(1 << 12, dtype=torch.uint8, device="cuda")
    copy([some], [torch.empty_like(some)], [some.nbytes], summed=True)
    copy([some], None, [some.nbytes], summed=True)
    copy([some], [torch.empty_like(some)], [some.nbytes], summed=False)
    driver().export(0, torch.ones(1 << 21, device="cuda").data_ptr())

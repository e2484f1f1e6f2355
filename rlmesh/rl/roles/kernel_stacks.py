"""Less GPU memory for the stacks of kernels, where several processes share a GPU.

CUDA keeps memory for the stack of every thread that may run on a GPU: by default 1,024 bytes each, a quarter of a GiB
on an H200, in every process. Kernels of torch need little of it, and the driver allocates more for a kernel that was
compiled to need more.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["DEFAULT_STACK", "SHARED_STACK", "shrink_kernel_stacks"]

DEFAULT_STACK = 1024
"""What CUDA keeps by default, in bytes per thread."""
SHARED_STACK = 512
"""What a process keeps that shares its GPUs, in bytes per thread: enough for functions that call themselves a little,
whose need a compiler cannot know."""
_STACK_SIZE = 0
"""``CU_LIMIT_STACK_SIZE``."""


def shrink_kernel_stacks() -> None:
    """Shrink the stacks on each GPU that this process uses. A size that somebody set is left alone.

    Does nothing without a GPU, and on GPUs without a CUDA driver.
    """
    if "torch" not in sys.modules:
        return  # an engine in a process of its own, which needs no torch here
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    for index in range(torch.cuda.device_count()):
        _shrink(cuda, index)


def _shrink(cuda: ctypes.CDLL, index: int) -> None:
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    context, size = ctypes.c_void_p(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), index):
        return
    if cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) or not active.value:
        return  # to retain a context that is not active would make one
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return
    try:
        if not cuda.cuCtxPushCurrent_v2(context):
            try:
                if not cuda.cuCtxGetLimit(ctypes.byref(size), _STACK_SIZE) and size.value == DEFAULT_STACK:
                    cuda.cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(SHARED_STACK))
            finally:
                cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)

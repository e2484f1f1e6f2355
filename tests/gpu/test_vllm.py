"""Weights from a trainer's GPU memory into vLLM's, in another process on the same GPU, by CUDA IPC."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.module_source import ModuleSource
from rlmesh.weights.sync import WeightSync
from tests.gpu.test_weights import KEY, ROOT
from tests.settling import settle

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.timeout(300),
]

GAP = 1e-3
"""Two engines of the same weights and kernels, which may batch otherwise."""
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.2,
}  # fmt: skip
EAGER = {**OPTIONS, "enforce_eager": True}
GRAPHS = {**OPTIONS, "compilation_config": {
    "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}}  # fmt: skip


class Engines:
    """This process as the trainer, and engines in processes of their own."""

    def __init__(self, sockets: str) -> None:
        self.sockets, self.rows = sockets, list[list[Any]]()
        self.processes: list[subprocess.Popen[str]] = []
        self.caller = Runtime.start(name="caller", key=KEY, socket_dir=sockets, job_id="wgpu")

    def start(self, specs: list[tuple[str, int, Path, int, dict[str, Any]]]) -> None:
        """Role, rank, folder of a model, version of that, options."""
        for role, rank, folder, version, options in specs:
            words = [KEY.hex(), self.sockets, role, rank, folder, version, json.dumps(options)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.gpu.vllm_peer", *map(str, words)], cwd=ROOT, env=dict(os.environ),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        for (role, rank, *_), process in zip(specs, self.processes, strict=True):
            assert process.stdout is not None
            told = next((line.split() for line in process.stdout if line.startswith("endpoint ")), None)
            assert told is not None, f"{role}:{rank} did not start"
            self.rows.append([role, rank, 0, told[1]])
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([1, self.rows]) + "\n")
            process.stdin.flush()
        book = AddressBook(1, tuple(MemberAddress(*row) for row in self.rows))
        self.caller.set_address_book(book)
        settle(self.caller)

    def ask(self, role: str, method: str, *args: Any) -> Any:
        return RoleGroup[Any](role, runtime=self.caller).call(method, *args).result(120)[0]

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.close()
                process.wait(60)
            finally:
                process.kill()
                process.stdout.close()
        self.caller.close()


@contextmanager
def engines() -> Iterator[Engines]:
    with ExitStack() as stack:
        made = Engines(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlm-")))
        stack.callback(made.close)
        yield made


@pytest.mark.case("O16")
@pytest.mark.case("O18")
@pytest.mark.parametrize("options", [EAGER, GRAPHS], ids=["eager", "CUDA graphs"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_after_a_push_it_says_what_a_fresh_engine_says(tied: bool, options: dict[str, Any], tmp_path: Path) -> None:
    from tests.engines.models import PROBE, PROMPTS, largest_gap, save, tiny

    old, new = (tiny(seed, tied=tied, heads=2).bfloat16() for seed in (0, 1))
    folders = [save(model, tmp_path / name) for model, name in ((old, "old"), (new, "new"))]
    trained = new.cuda()
    with engines() as members:
        members.start([("SINK", 0, folders[0], 0, options), ("FRESH", 0, folders[1], 0, options)])
        wanted = members.ask("FRESH", "log_probs", PROBE)
        tokens = members.ask("FRESH", "greedy", PROMPTS, 24)[0]
        assert largest_gap(members.ask("SINK", "log_probs", PROBE), wanted) > 0.1, "the new weights say something else"
        sinks: RoleGroup[Any] = RoleGroup("SINK", runtime=members.caller)
        with WeightSync(ModuleSource(trained), sinks, runtime=members.caller) as sync:
            assert "by cuda_ipc: same GPU" in str(sync.plan())
            for version in range(1, 8):
                sync.push(version).result(60)
            assert largest_gap(members.ask("SINK", "log_probs", PROBE), wanted) < GAP
            assert members.ask("SINK", "greedy", PROMPTS, 24) == (tokens, [7] * len(PROMPTS))

            # There and back: what is served is what was pushed last.
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(0.5)
            sync.push(8).result(60)
            assert largest_gap(members.ask("SINK", "log_probs", PROBE), wanted) > 0.1
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(2.0)
            sync.push(9).result(60)
            assert largest_gap(members.ask("SINK", "log_probs", PROBE), wanted) < GAP


def test_an_engine_sleeps_wakes_and_takes_weights(tmp_path: Path) -> None:
    """Level 2 gives the weights up: nothing is served before the next push."""
    from tests.engines.models import PROBE, largest_gap, save, tiny

    model = tiny(0, heads=2).bfloat16()
    folder = save(model, tmp_path / "model")
    with engines() as members:
        members.start([("SINK", 0, folder, 0, {**EAGER, "enable_sleep_mode": True})])
        before = members.ask("SINK", "log_probs", PROBE)
        awake, asleep, again = members.ask("SINK", "sleep_and_wake", 1)
        assert asleep > awake + (32 << 20) and again < asleep - (32 << 20), "the cache's memory was given back"
        assert largest_gap(members.ask("SINK", "log_probs", PROBE), before) < GAP
        members.ask("SINK", "sleep_and_wake", 2)
        with pytest.raises(Exception, match="gave its weights up to sleep"):
            members.ask("SINK", "log_probs", PROBE)
        sinks: RoleGroup[Any] = RoleGroup("SINK", runtime=members.caller)
        with WeightSync(ModuleSource(model.cuda()), sinks, runtime=members.caller) as sync:
            sync.push(1).result(60)
            assert largest_gap(members.ask("SINK", "log_probs", PROBE), before) < GAP


@pytest.mark.case("O17")
def test_an_engine_that_is_killed_is_named(tmp_path: Path) -> None:
    from tests.engines.models import save, tiny

    model = tiny(0, heads=2).bfloat16()
    folder = save(model, tmp_path / "model")
    with engines() as members:
        members.start([("SINK", 0, folder, 0, EAGER)])
        sinks: RoleGroup[Any] = RoleGroup("SINK", runtime=members.caller)
        with WeightSync(ModuleSource(model.cuda()), sinks, runtime=members.caller, bucket_timeout_s=10) as sync:
            sync.push(1).result(60)
            members.processes[0].kill()
            with pytest.raises(WeightSyncError, match="SINK:0"):
                sync.push(2).result(60)

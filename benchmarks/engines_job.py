"""The roles of `benchmarks/engines.py`: a source in one process, two vLLM engines in two others, and who pushes."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlmesh import ModuleSource, ReceivesWeights, RoleGroup, SendsWeights, WeightSync, current_worker, rpc
from rlmesh.rl import SamplingParams

BETWEEN_S = 0.1
"""From one push to the next while requests run, so that they come on."""


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


def tiny(seed: int, *, tied: bool) -> Any:
    """0.34 million parameters, as in the PPO example."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=46, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=tied, pad_token_id=0,
            eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


class Actor(SendsWeights):
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.send_weights(ModuleSource(tiny(1, tied=config()["tied"])))


class Rollout(ReceivesWeights):
    def setup(self) -> None:
        from rlmesh.rl import AsyncVllmEngine, VllmEngine

        kind: Any = AsyncVllmEngine if config()["kind"] == "async" else VllmEngine
        self.engine: Any = kind(
            config()["model"], dtype="float32", max_model_len=512, max_num_seqs=64, kv_cache_memory_bytes=64 << 20
        )
        self.receive_weights(self.engine.sink)
        self.samples: list[Any] = []
        self.load: threading.Thread | None = None
        self.stopping = threading.Event()

    @rpc
    def run_on(self, requests: int) -> None:
        """Keep so many requests running until ``wait`` is called."""

        def run() -> None:
            while not self.stopping.is_set():
                self.samples += self.engine.generate([[5, 6, 7]] * requests, SamplingParams(max_tokens=400, seed=1))

        self.load = threading.Thread(target=run)
        self.load.start()

    @rpc
    def wait(self) -> list[int]:
        """Until the last ones are done; how many samples, how many of these were made by several versions, tokens."""
        assert self.load is not None
        self.stopping.set()
        self.load.join(60)
        spans = [len(sample.version_spans) for sample in self.samples]
        return [len(spans), sum(count > 1 for count in spans), sum(len(s.token_ids) for s in self.samples)]

    def teardown(self) -> None:
        self.close_weights()
        self.engine.close()


class Trainer:
    def run(self) -> None:
        rollout: RoleGroup[Any] = RoleGroup("ROLLOUT")
        pushes, requests = config()["pushes"], config()["requests"]
        found: dict[str, Any] = {}
        with WeightSync(RoleGroup("ACTOR"), rollout) as sync:
            for version in range(1, 6):
                sync.push(version).result()
            if requests:
                rollout.call("run_on", requests).result()
                time.sleep(0.5)
            times, staged = [], []
            for version in range(6, 6 + pushes):
                began = time.perf_counter()
                report = sync.push(version).result()
                times.append(1e3 * (time.perf_counter() - began))
                staged.append(1e3 * report.staged_s)
                if requests:
                    time.sleep(BETWEEN_S)
            if requests:
                found["samples"] = rollout.call("wait").result()
        quartiles = statistics.quantiles(times, n=20)
        found |= {
            "median_ms": statistics.median(times),
            "staged_ms": statistics.median(staged),
            "p95_ms": quartiles[-1],
            "pushes": pushes,
        }
        Path(config()["out"]).write_text(json.dumps(found))

"""Small runs whose state is more than weights: a controller of the KL penalty, a critic, dropout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlmesh.rl.algorithms import GRPO, PPO, Algorithm
from rlmesh.rl.algorithms.protocol import Evaluated, TokenWeights
from rlmesh.rl.kl import KLController
from rlmesh.rl.rewards import Reward
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings
from tests.rl.conftest import make_tiny
from tests.rl.run_job import ROWS, is_a

PROMPTS = ROWS[:30]
"""Batches of 8: steps 4 and 8 take the end of an epoch and the beginning of the next."""


@dataclass(frozen=True)
class Controlled(PPO):
    """PPO whose KL penalty is controlled, and that counts its batches."""

    held: list[Any] = field(default_factory=lambda: [KLController(0.1, target=0.02, horizon=100), 0])

    def weigh(self, batch: Evaluated) -> TokenWeights:
        assert batch.ref_log_probs is not None and batch.log_probs is not None
        fixed = PPO(samples=self.samples, kl=self.held[0].coefficient)
        kl = ((batch.log_probs - batch.ref_log_probs) * batch.mask).sum(1).mean()
        self.held[:] = self.held[0].updated(float(kl), samples=len(batch.mask)), self.held[1] + 1
        weights = fixed.weigh(batch)
        return replace(weights, metrics={**weights.metrics, "kl_coefficient": fixed.kl, "batches": self.held[1]})

    def state(self) -> Mapping[str, Any]:
        return {"coefficient": self.held[0].coefficient, "batches": self.held[1]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.held[:] = replace(self.held[0], coefficient=state["coefficient"]), state["batches"]


def make(model: Path, algorithm: str | Algorithm = "grpo", **changes: Any) -> Run:
    named = {"grpo": GRPO(samples=4), "ppo": Controlled(samples=4, kl=0.1)}
    chosen = named[algorithm] if isinstance(algorithm, str) else algorithm
    settings: dict[str, Any] = {
        "model": str(model), "data": PROMPTS, "rewards": [Reward(is_a, inline=True)], "algorithm": chosen,
        "batch_size": 8, "steps": 8, "save_every": 2, "keep_last": 3, "actor": ActorSettings(lr=1e-2),
        "critic": CriticSettings(lr=1e-2), "rollout": RolloutSettings(max_tokens=4),
    }  # fmt: skip
    return Run(**settings | changes)


def make_model(folder: Path) -> Path:
    """A model with dropout, and a tokenizer of letters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    make_tiny(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def content(run_dir: Path) -> dict[str, str]:
    """The checksums of the last checkpoint's data (weights and optimizers of all roles, the trainer's objects), and the
    bytes of the exported weights."""
    last = max((run_dir / "checkpoints").glob("step-*/checkpoint.json")).parent
    found = {"model": (run_dir / "model" / "model.safetensors").read_bytes().hex()}
    for current in sorted(last.glob("*/current.json")):
        found[current.parent.name] = json.loads(current.read_text())["files"]["__0_0.distcp"]["sha256"]
    state = json.loads((last / "trainer" / "state.json").read_text())
    found["objects"] = json.dumps(state["objects"], sort_keys=True)
    return found


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The reported metrics by step, without times, numbers of steps, and those of buffer and memory; of a step that was
    made again, those of the last time."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found[entry["step"]] = {
            name: value
            for name, value in entry["metrics"].items()
            if name not in ("total_steps", "steps_lost")
            and not name.endswith("_s")
            and not name.startswith(("buffer/", "memory/"))
        }
    return found

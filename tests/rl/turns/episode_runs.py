"""Small runs whose episodes have several turns: a game, and an agent that asks the endpoint."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import Reward
from rlmesh.rl.rollout.episodes import EpisodeSettings, TurnResult, agent_result, episode_return
from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings

PROMPTS = 64
ROWS = [{"prompt": "abcdef"[place % 6] + "gh"[place // 6 % 2] * (place // 12) + ">"} for place in range(PROMPTS)]
TURNS = 2
SAID = "b>"


class Echo:
    """A game of two turns, which rewards every a."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.turns = 0

    def step(self, action: str) -> TurnResult:
        self.turns += 1
        return TurnResult(SAID, reward=action.count("a") / 4, done=self.turns == TURNS)


def asks(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """An agent that asks twice by plain HTTP."""
    text, letters = row["prompt"], 0
    for _ in range(TURNS):
        said = complete(base_url, api_key, text)
        letters += said.count("a")
        text += said + SAID
    return letters / 4


def complete(base_url: str, api_key: str, prompt: str) -> str:
    """The text that follows a prompt."""
    request = urllib.request.Request(
        f"{base_url}/completions", json.dumps({"model": "policy", "prompt": prompt}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: str = json.load(answer)["choices"][0]["text"]
    return found


def make(model: Path, kind: str, *, batch_size: int = 16, steps: int = 8, **changes: Any) -> Run:
    """A run with a game (``environment``) or an agent (``agent``), of two epochs."""
    given: dict[str, Any] = {"environment": Echo} if kind == "environment" else {"agent": asks}
    reward = episode_return if kind == "environment" else agent_result
    settings: dict[str, Any] = {
        "model": str(model), "data": ROWS[: batch_size * steps // 2], "rewards": [Reward(reward, inline=True)],
        "algorithm": GRPO(samples=2), "batch_size": batch_size, "steps": steps, "save_every": 2, "keep_last": 3,
        "actor": ActorSettings(lr=1e-3), "rollout": RolloutSettings(max_tokens=3),
        "episode": EpisodeSettings(max_tokens=20),
    }  # fmt: skip
    return Run(**settings | given | changes)


def faults(run_dir: Path, run: Run) -> list[str]:
    """Faults of the ledger of a run that is complete: each prompt is trained once per epoch, and in order."""
    found = faults_of(run_dir / LEDGER)
    rows = [row for row in read_rows(run_dir / LEDGER) if row.state == "trained"]
    wanted = Counter(dict.fromkeys(range(1, run.steps + 1), run.batch_size))
    if Counter(row.step for row in rows) != wanted:
        found.append(f"steps have {Counter(row.step for row in rows)} groups")
    for epoch in {row.epoch for row in rows}:
        prompts = sorted(row.prompt for row in rows if row.epoch == epoch)
        if prompts != list(range(len(run.data))):
            found.append(f"epoch {epoch} has the prompts {prompts}")
    return found


def reported(run_dir: Path) -> dict[int, dict[str, float]]:
    """The reports of steps with rewards, by step; of a step that was made again, the last one."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines if "reward_mean" in line["metrics"]}

"""A policy learns to use a calculator instead of guessing products; needs no GPU.

python tiny.py calculator small     # makes a model, its tokenizer and its data in the folder "small"
python calculator.py small
"""

import sys

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rollout.episodes import EpisodeSettings, ToolCall
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings


def calculate(expression: str) -> str:
    """Multiply two numbers."""
    a, b = expression.split("*")
    return str(int(a) * int(b))


def calls(text):
    """The policy of this example writes ``=12*34`` to call the calculator."""
    return [ToolCall("calculate", {"expression": text[1:]})] if text.startswith("=") else []


def right(sample, ground_truth):
    return sample.episode.extras["messages"][-1]["content"] == ground_truth


def make(folder, words=()):
    return Run.from_args(
        words, model=folder, data=f"{folder}/train.jsonl", rewards=[right], algorithm=GRPO(samples=8), steps=20,
        batch_size=16, tools=[calculate], episode=EpisodeSettings(max_turns=3, max_tokens=40, tool_calls=calls),
        actor=ActorSettings(lr=1e-3), rollout=RolloutSettings(max_tokens=12),
    )  # fmt: skip


if __name__ == "__main__":
    folder, *words = sys.argv[1:] or ["small"]
    print("right answers:", make(folder, words).submit("calculator").metrics["reward_mean"])

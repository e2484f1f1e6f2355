"""An agent that knows nothing of training: it takes a base URL, and asks a policy there with OpenAI's client.

python tiny.py calculator small     # makes a model, its tokenizer and its data in the folder "small"
python agent.py small               # trains the policy by what the agent does with it; needs no GPU
"""

import sys

import openai

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rollout.episodes import EpisodeSettings, agent_result
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings


def solve(base_url, row):
    """Ask for a product; carry out the multiplications that the policy asks for (``=12*34``)."""
    with openai.OpenAI(base_url=base_url) as client:
        messages = list(row["prompt"])
        for _ in range(3):
            made = client.chat.completions.create(model="policy", messages=messages)
            answer = made.choices[0].message.content
            if not answer.startswith("="):
                return answer == row["ground_truth"]
            a, b = answer[1:].split("*")
            messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": str(int(a) * int(b))}]
    return False


def make(folder, words=()):
    return Run.from_args(
        words, model=folder, data=f"{folder}/train.jsonl", rewards=[agent_result], algorithm=GRPO(samples=8), steps=20,
        batch_size=16, agent=solve, episode=EpisodeSettings(max_turns=3, max_tokens=40),
        actor=ActorSettings(lr=1e-3), rollout=RolloutSettings(max_tokens=12),
    )  # fmt: skip


if __name__ == "__main__":
    folder, *words = sys.argv[1:] or ["small"]
    print("right answers:", make(folder, words).submit("agent").metrics["reward_mean"])

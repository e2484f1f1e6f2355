"""A small job whose rollout members write text with a model that its trainer keeps improving.

    rlmesh launch examples/embedding/job.py -- --steps 600

The model is a table of successors of words, so that it runs anywhere. The structure is that of a real job: a trainer
that controls it, and rollout members that serve the last policy that they got.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import defaultdict
from typing import TypedDict

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc

TEXT = """the trainer asks the rollout for text and the rollout writes text for the trainer the critic reads the text
and the reward reads the text the trainer learns from the reward and the rollout gets the weights of the trainer"""

Table = dict[str, list[str]]
"""Word → its successors in the text, with repetitions."""


class Generation(TypedDict):
    """A generated text, and the version of its policy. Plain data, for processes that do not import this script."""

    text: str
    policy_version: int
    rank: int


class Rollout:
    def __init__(self) -> None:
        self.version, self.table = 0, Table()

    @rpc
    def update(self, version: int, table: Table) -> None:
        """Replace the policy."""
        self.version, self.table = version, table

    @rpc
    def generate(self, prompt: str, words: int, seed: int | None = None) -> Generation:
        """Continue ``prompt`` by up to ``words`` words."""
        if not self.table:
            raise RuntimeError("this member has no policy yet")
        draw = random.Random(seed)
        written = prompt.split() or ["the"]
        for _ in range(words):
            following = self.table.get(written[-1])
            if not following:
                break
            written.append(draw.choice(following))
        return {"text": " ".join(written), "policy_version": self.version, "rank": current_worker().rank}


class Trainer:
    def run(self) -> None:
        config = current_worker().job_info.user_config
        rollout = RoleGroup("ROLLOUT")
        words = TEXT.split()
        for step in range(1, config["steps"] + 1):
            table: Table = defaultdict(list)
            for word, following in itertools.pairwise(words):
                table[word].append(following)
            rollout.call(Rollout.update, step, dict(table)).result()
            current_worker().report(step=step, words=len(table))
            if current_worker().step_boundary(step) is not None:
                return
            time.sleep(config["step_s"])


def build(steps: int, step_s: float, rollouts: int = 2) -> DLJob:
    """The job's description."""
    return (
        DLJobBuilder()
        .config({"steps": steps, "step_s": step_s})
        .role("ROLLOUT").run(Rollout).total(rollouts)
        .role("TRAINER").run(Trainer)
        .build()
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step_s", type=float, default=1.0)
    options = parser.parse_args()
    if options.steps < 1 or not 0 <= options.step_s < 86400:
        parser.error(f"--steps {options.steps} --step_s {options.step_s}: at least one step, of 0 to 86400 seconds")
    build(options.steps, options.step_s).submit("embedding")

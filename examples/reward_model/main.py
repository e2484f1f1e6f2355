"""Train a reward model on pairs of responses, of which people prefer one.

python examples/reward_model/pairs.py tiny       # a model and pairs to try it with, in the folder "tiny"
python examples/reward_model/main.py tiny --steps 120 --lr 2e-3

The result is a folder for `RewardModel`. The loss is that of Bradley and Terry (1952), as in Ouyang et al. 2022
(arXiv:2203.02155): -log sigmoid(reward of the chosen response - reward of the rejected one).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import DLJobBuilder, current_worker
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    """The folder with the model, train.* and validation.*, and the settings of the training."""

    folder: Path
    steps: int
    batch_size: int
    lr: float
    ranks: int
    max_tokens: int = 2048
    save_every: int = 50


@dataclass(frozen=True)
class Pairs:
    """Token ids of chosen and rejected conversations, as many of one as of the other."""

    chosen: list[list[int]]
    rejected: list[list[int]]

    def __len__(self) -> int:
        return len(self.chosen)

    def split(self, parts: int) -> list[Pairs]:
        ends = [len(self) * part // parts for part in range(parts + 1)]
        return [self.slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def slice(self, begin: int, end: int) -> Pairs:
        return Pairs(self.chosen[begin:end], self.rejected[begin:end])


class RewardTrainer:
    """One rank of the training."""

    def setup(self) -> None:
        import torch
        import torch.distributed as dist
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from rlmesh.rl import DDPEngine, TrainingOptions
        from rlmesh.rl.data.loader import order

        self.order, worker = order, current_worker()
        self.settings: Settings = worker.job_info.user_config
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if gpu else "cpu")
        torch.set_num_threads(1)
        dist.init_process_group("nccl" if gpu else "gloo")
        self.tokenizer = AutoTokenizer.from_pretrained(self.settings.folder)
        torch.manual_seed(0)  # of the new head
        model = AutoModelForSequenceClassification.from_pretrained(
            self.settings.folder, num_labels=1, dtype=torch.float32
        )
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        if model.config.pad_token_id is None:
            raise UsageError(f"the tokenizer in {self.settings.folder} has no padding token: set one and save it again")
        model.config.architectures = [type(model).__name__]
        self.model = model.to(self.device)
        self.engine = DDPEngine(self.model, TrainingOptions(lr=self.settings.lr, micro_batch_size=64))
        self.checkpoints = Path(worker.run_dir) / "checkpoints"
        if (self.checkpoints / "current.json").exists():
            self.engine.load(self.checkpoints)
        self.train, self.held_out = self.read("train"), self.read("validation")

    def teardown(self) -> None:
        import torch.distributed as dist

        self.engine.close()
        dist.destroy_process_group()

    def read(self, name: str) -> Pairs:
        """The pairs of a file; those with a conversation that is too long are left out, and counted."""
        from rlmesh.rl.data.files import read_rows
        from rlmesh.rl.roles.reward import conversation_ids

        rows = read_rows(sorted(self.settings.folder.glob(f"{name}.*")))
        pairs = Pairs([], [])
        for row in rows:
            both = row if "chosen" in row else row["extra_info"]  # as `rlmesh prepare hh_rlhf` writes them
            ids = [conversation_ids(self.tokenizer, row["prompt"], both[side]) for side in ("chosen", "rejected")]
            if max(map(len, ids)) <= self.settings.max_tokens:
                pairs.chosen.append(ids[0])
                pairs.rejected.append(ids[1])
        if current_worker().rank == 0:
            print(f"{name}: {len(pairs)} pairs, {len(rows) - len(pairs)} too long", flush=True)
        return pairs

    def run(self) -> None:
        settings, worker = self.settings, current_worker()
        while self.engine.steps < settings.steps:
            share = self.batch(self.engine.steps).split(worker.world_size)[worker.rank]
            report = self.engine.train_step(share, self.loss)
            is_last = report.step == settings.steps
            if is_last or report.step % settings.save_every == 0:
                self.engine.save(self.checkpoints).result()
            found = {"accuracy": report.statistics["right"], "loss": report.loss, "grad_norm": report.grad_norm}
            if is_last or report.step % 20 == 0:
                found["held_out_accuracy"] = self.accuracy()
            worker.report(step=report.step, total_steps=settings.steps, **found)
        target = settings.folder / "reward"
        self.engine.export(target)
        if worker.rank == 0:
            self.tokenizer.save_pretrained(target)
            print(f"held-out accuracy: {self.accuracy():.3f}", flush=True)

    def batch(self, step: int) -> Pairs:
        """The pairs of a step, which depend on its number only: so nothing is saved to go on after a restart."""
        size, count = self.settings.batch_size, len(self.train)
        places = [divmod(position, count) for position in range(step * size, (step + 1) * size)]
        chosen = [int(self.order(0, epoch, count)[place]) for epoch, place in places]
        return Pairs([self.train.chosen[i] for i in chosen], [self.train.rejected[i] for i in chosen])

    def loss(self, model: nn.Module, part: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the mean loss of the batch, and of the share of pairs that are ranked right."""
        from torch.nn.functional import logsigmoid

        rewards = self.rewards(model, [*part.chosen, *part.rejected])
        margins = rewards[: len(part)] - rewards[len(part) :]
        size = self.settings.batch_size
        return -logsigmoid(margins).sum() / size, {"right": (margins > 0).sum() / size}

    def rewards(self, model: Any, rows: Sequence[list[int]]) -> Tensor:
        """The model's output for each row of token ids, ``[rows]``."""
        import torch

        # A rank without pairs makes a pass as well, whose sum over no rows is 0.
        filled = rows or [[self.tokenizer.eos_token_id]]
        width, pad = max(map(len, filled)), model_config(model).pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in filled], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in filled], device=self.device)
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits[: len(rows), 0]
        return logits.float()

    def accuracy(self) -> float:
        """The share of held-out pairs that are ranked right."""
        import torch

        right = 0
        self.model.eval()
        with torch.no_grad():
            for begin in range(0, len(self.held_out), 64):
                part = self.held_out.slice(begin, begin + 64)
                rewards = self.rewards(self.model, [*part.chosen, *part.rejected])
                right += int((rewards[: len(part)] > rewards[len(part) :]).sum())
        self.model.train()
        return right / len(self.held_out)


def model_config(model: Any) -> Any:
    """The configuration of a model, also inside of a wrapper of DDP."""
    return getattr(model, "module", model).config


def settings_of(argv: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description="Train a reward model on pairs of responses.")
    parser.add_argument("folder", type=Path, help="with the model, train.* and validation.*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=64, help="pairs of a step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(argv)
    small = [name for name in ("steps", "batch_size", "lr", "ranks") if getattr(options, name) <= 0]
    if small:
        parser.error(f"{', '.join(small)}: must be > 0")
    for needed in ("config.json", "train.*", "validation.*"):
        if not any(options.folder.glob(needed)):
            parser.error(
                f"the folder {options.folder} has no {needed}: python examples/reward_model/pairs.py makes one"
            )
    return Settings(**vars(options) | {"folder": options.folder.resolve()})


if __name__ == "__main__":
    settings = settings_of()
    job = DLJobBuilder().config(settings).node_num(1).device_type("CPU").device_per_node(settings.ranks)
    job.role("TRAINER").train(RewardTrainer).nnodes(1).nproc_per_node(settings.ranks)
    job.build().submit("reward-model")

"""Trainers on responses of the data: without rollout engines and without rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from rlmesh.rl.algorithms.protocol import Evaluated, TokenWeights
from rlmesh.rl.data.loader import Drawn, PromptLoader
from rlmesh.rl.evaluation.settings import SampleSettings
from rlmesh.rl.offline.responses import OfflineBuffer, offline_groups
from rlmesh.rl.packing import Packs
from rlmesh.rl.samples.writer import SampleWriter
from rlmesh.rl.trainers.batches import joined, matrix_of, shares_of
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.types import Group

__all__ = ["OfflineTrainer", "RewardModelTrainer"]


class OfflineTrainer(Trainer):
    """Trains on the responses of the data: for `SFT` and `DPO`."""

    def setup(self) -> None:
        super().setup()
        self.samples = SampleWriter(self.run_dir, SampleSettings(every=0), self.text_of)  # the data has the responses

    def make_buffer(self, loader: PromptLoader) -> Any:
        return OfflineBuffer(self.groups_of, loader)

    def connect(self) -> None:
        """Connects nothing: the responses are in the data."""

    def groups_of(self, drawn: Sequence[Drawn]) -> list[Group]:
        """Groups of the responses in the prompts' rows."""
        run = self.settings
        most, key = run.rollout.max_tokens, run.prompt_key
        return offline_groups(drawn, self.tokenizer, self.algorithm.responses, most, key, self.pad)

    @cached_property
    def pad(self) -> int | None:
        """The padding token of the model in training, as a scorer of `RewardModel` finds it."""
        from transformers import AutoConfig

        own: int | None = getattr(AutoConfig.from_pretrained(self.settings.model), "pad_token_id", None)
        return self.tokenizer.pad_token_id if own is None else own

    def publish(self) -> None:
        """Pushes nothing: no engine takes the weights."""

    def train(
        self, packs: dict[str, list[Packs]], batch: Evaluated, weights: TokenWeights,
        meanwhile: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, float]:  # fmt: skip
        # The loss of pairs has no ratio: without old log-probabilities the step's own take their place, and it is 1.
        own = replace(batch, log_probs=None) if self.algorithm.responses == "pairs" else batch
        return super().train(packs, own, weights, meanwhile)

    def gap(self, log_probs: torch.Tensor, batch: Evaluated) -> dict[str, float]:
        return {}  # no engine sampled

    def validate(self) -> dict[str, float]:
        """The algorithm's metrics on the validation data, and ``val/nll``: the mean loss of a token, in nats."""
        prompts = self.validation_prompts
        if prompts is None:
            return {}
        groups = self.groups_of([Drawn((0, prompt.index), prompt) for prompt in prompts])
        packs, batch = self.evaluate(groups)
        found = dict(self.algorithm.weigh(batch).metrics) | self.likelihood(packs, batch)
        return {f"val/{name}": value for name, value in found.items()}

    def likelihood(self, packs: dict[str, list[Packs]], batch: Evaluated) -> dict[str, float]:
        """The mean of −log π over the tokens of the responses."""
        log_probs = batch.log_probs
        if log_probs is None:
            own = joined(packs["actor"])
            rows = self.ask(self.actor, "log_probs", own, self.version).result()
            log_probs = matrix_of(batch.mask, own, [one for each in rows for one in each])
        return {"nll": -float(log_probs[batch.mask].mean())}


class RewardModelTrainer(OfflineTrainer):
    """Trains a reward model, for `RewardModelling`: its only role, the actor, holds a model with one label."""

    @property
    def critic(self) -> Any:
        return self.actor

    def trained(self) -> list[tuple[str, Any, Any]]:
        return [("critic", self.actor, self.settings.actor)]

    def parts(self) -> list[tuple[str, Any]]:
        return [("actor", self.actor)]  # the name of the role's section

    def train(
        self, packs: dict[str, list[Packs]], batch: Evaluated, weights: TokenWeights,
        meanwhile: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, float]:  # fmt: skip
        shares = [shares_of(one, batch, weights) for one in packs["critic"]]
        by_rank = [list(own) for own in zip(*shares, strict=True)]
        call = self.actor.call("update", by_rank, [self.version] * len(by_rank), _scatter=True)
        metrics, reports = meanwhile(), call.result()
        # The critic's error has the gradient of the pairs' loss, but not its value.
        wanted = ("critic/grad_norm", "critic/lr")
        return {**metrics, **{name: reports[0][name] for name in wanted if name in reports[0]}, **weights.metrics}

    def likelihood(self, packs: dict[str, list[Packs]], batch: Evaluated) -> dict[str, float]:
        return {}

"""`RewardRole`: a reward model that scores conversations in batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmesh import RLJobBuilder, current_worker, rpc
from rlmesh.errors import UsageError
from rlmesh.rl.head.full_precision import FullPrecisionLinear
from rlmesh.rl.rewards.model import Conversation, RewardModel
from rlmesh.rl.roles.defaults import choose_device, run_settings
from rlmesh.rl.roles.device_turns import TakesTurns
from rlmesh.rl.roles.frozen import FrozenModel
from rlmesh.rl.types import Failed, Outcome, Score

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["ModelScorer", "RewardRole", "add_reward_roles", "conversation_ids"]


class RewardRole(TakesTurns):
    """Scores conversations with the reward model that this role belongs to. Override `make_scorer` for another
    model."""

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        role = current_worker().role
        self.settings = next(one for one in self.run_settings.reward_models if one.role == role)
        self.device = choose_device(self.settings.threads)
        self.turns = self.make_turns()
        with self.turns.lease():
            self.scorer = self.make_scorer()
            self.turns.add(role, wake=self.scorer.wake, sleep=self.scorer.sleep)

    def make_scorer(self) -> ModelScorer:
        """Load the model with its tokenizer."""
        return ModelScorer(self.settings, self.device)

    @rpc
    def score(self, conversations: Sequence[Conversation]) -> list[Outcome]:
        """The outcome of each conversation, in their order."""
        with self.turns.turn(current_worker().role):
            return self.scorer.score(conversations)


class ModelScorer(FrozenModel):
    """A reward model in this process.

    Args:
        settings: the model and its limits.
        device: the device of the model.

    Raises:
        UsageError: the model has no trained head, or several labels of which none is chosen.
    """

    def __init__(self, settings: RewardModel, device: torch.device | str = "cpu") -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            settings.model, dtype=dtype, output_loading_info=True
        )
        # transformers makes a random head if the files have none.
        if missing := sorted(loading["missing_keys"]):
            raise UsageError(
                f"RewardModel({settings.model!r}): the model's files lack {', '.join(missing)}, and would be random: "
                "it is no trained reward model"
            )
        for head in (getattr(model, "score", None), getattr(model, "classifier", None)):
            if type(head) is nn.Linear:
                head.__class__ = FullPrecisionLinear  # bfloat16 would round rewards to three digits
        super().__init__(model.to(torch.device(device)).eval())
        self.settings = settings
        self.config: Any = model.config
        self.tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
        self.label = settings.label_of(model.config)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        own = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens = settings.max_tokens or own or 2**31

    def score(self, conversations: Sequence[Conversation]) -> list[Outcome]:
        """The outcome of each conversation, in their order.

        Conversations that are too long, or not scored before the deadline, are `Failed`.
        """
        deadline = time.monotonic() + self.settings.timeout_s
        late = Failed(f"timeout: the reward model took longer than {self.settings.timeout_s:g} s")
        found: list[Outcome] = [late] * len(conversations)
        rows: dict[int, list[int]] = {}
        for place, one in enumerate(conversations):
            ids = self.encode(one)
            if isinstance(ids, Failed):
                found[place] = ids
            elif not 0 < len(ids) <= self.max_tokens:
                found[place] = Failed(f"the reward model reads 1 to {self.max_tokens} tokens, got {len(ids)}")
            else:
                rows[place] = ids
        for places in self._batches(rows):
            if time.monotonic() > deadline:
                break
            for place, value in zip(places, self._forward([rows[place] for place in places]), strict=True):
                finite = value == value and abs(value) != float("inf")
                found[place] = Score(value) if finite else Failed(f"the reward model gave {value}")
        return found

    def encode(self, one: Conversation) -> list[int] | Failed:
        """The model's input ids of a conversation."""
        if self.settings.inputs == "ids":
            ids: list[int] = one.ids.tolist()
            return ids
        if one.turns > 1:
            return Failed(
                f"the episode has {one.turns} turns of the policy, which another tokenizer cannot format: use a "
                "reward model with the policy's vocabulary and inputs='ids'"
            )
        return conversation_ids(self.tokenizer, one.prompt, one.response, ended=one.ended)

    def _batches(self, rows: dict[int, list[int]]) -> Iterator[list[int]]:
        """Batches of indices: rows of similar length, within the token budget; single rows if the model has no padding
        token."""
        batch: list[int] = []
        for place in sorted(rows, key=lambda one: -len(rows[one])):
            width = len(rows[batch[0]]) if batch else 0
            if batch and ((len(batch) + 1) * width > self.settings.token_budget or self.config.pad_token_id is None):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        width, pad = max(map(len, rows)), self.config.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
        rewards = logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]
        found: list[float] = rewards.tolist()
        return found


def add_reward_roles(builder: RLJobBuilder, rewards: Iterable[object], resource: Mapping[str, Any]) -> list[str]:
    """Add a role to a job for each reward model among its rewards.

    Args:
        builder: the job.
        rewards: the rewards of the run.
        resource: resources of each member, as for ``.resource(…)``.

    Returns:
        the names of the roles.
    """
    models = [one for one in rewards if isinstance(one, RewardModel)]
    for model in models:
        builder.role(model.role).run(RewardRole).resource(**resource).total(model.members)
    return [model.role for model in models]


def conversation_ids(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]], response: str, *, ended: bool = True
) -> list[int]:
    """Token ids of a prompt and its response, as a reward model is trained on them and scores them.

    Args:
        tokenizer: the tokenizer of the reward model.
        prompt: a text, or chat messages, which the tokenizer's chat template formats together with the response.
        response: the text of the response.
        ended: the response ended by itself. If ``prompt`` is a text, the tokenizer's end token is then appended, unless
            it is there already.
    """
    if not isinstance(prompt, str):
        messages = [*map(dict, prompt), {"role": "assistant", "content": response}]
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
    ids = list(tokenizer(prompt + response)["input_ids"])
    end = tokenizer.eos_token_id
    return [*ids, end] if ended and end is not None and ids[-1:] != [end] else ids

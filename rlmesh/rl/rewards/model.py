"""`RewardModel`: a reward that a model gives, served by a role of its own.

::

    Run(rewards=[RewardModel("models/helpful", weight=0.5), Reward(gsm8k.compute_score, sources=("openai/gsm8k",))], …)

A `Run` takes a `RewardModel`, and the trainer calls it. The model itself is loaded by the members of the role
(:class:`rlmesh.rl.roles.reward.RewardRole`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlmesh import RoleGroup
from rlmesh.errors import UsageError
from rlmesh.rl.faults import CheckedKeywords
from rlmesh.rl.rewards.reward import Response, number_of, source_names
from rlmesh.rl.types import Failed, Outcome

__all__ = ["Conversation", "RewardModel"]

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""Seconds that a call waits beyond the deadline of scoring, since a member may restart."""
Inputs = Literal["text", "ids"]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A prompt and a response, as sent to a reward model.

    Attributes:
        ids: all tokens of the episode, ``[tokens]``, int32.
        prompt: a text or chat messages: the prompt of the row, with what an environment or an agent said before the
            response.
        response: the text of the response.
        ended: the response ended by itself; no limit cut it off.
        turns: the number of turns that the policy sampled.
    """

    ids: NDArray[np.int32]
    prompt: str | Sequence[Mapping[str, Any]]
    response: str
    ended: bool
    turns: int


@dataclass(frozen=True)
class RewardModel(CheckedKeywords):
    """A model that scores responses: any that ``AutoModelForSequenceClassification`` loads.

    A model with one label gives its raw output as the reward. With several labels, the reward is the probability of
    ``label``.

    Attributes:
        model: a folder or hub name of the model and its tokenizer.
        weight: weight in the sum of an episode's rewards.
        name: name in metrics, and in the name of the role: ``REWARD``, or ``REWARD_NAME`` for another name than the
            default.
        sources: the name or names of data sets (``data_source``) whose rows it scores; it abstains on other rows.
            Empty: it scores all rows.
        label: name or number of the label, for models with several.
        inputs: ``"text"``: prompt and response in the format of the model's own tokenizer (its chat template for
            messages). ``"ids"``: the tokens as they were sampled; both tokenizers must have the same vocabulary.
        members: number of processes of the role; each has the whole model.
        max_tokens: the most tokens of a conversation; a longer one is `Failed`, not cut. 0: the model's own limit.
        token_budget: the most tokens of a forward pass, padding included.
        timeout_s: seconds in which a batch must be scored; responses that are not scored by then are `Failed`.
        precision: dtype of the model; its rewards are float32.
        threads: torch's threads in each member; 0: torch's default.

    Raises:
        UsageError: a setting is out of range.
    """

    model: str
    weight: float = 1.0
    name: str = "reward_model"
    sources: str | Sequence[str] = ()
    label: str | int | None = None
    inputs: Inputs = "text"
    members: int = 1
    max_tokens: int = 0
    token_budget: int = 16384
    timeout_s: float = 300.0
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "sources", source_names(self.sources))
        faults = [
            f"{name}={getattr(self, name)} must be {bound}"
            for name, bound, right in (
                ("weight", "a finite number", number_of(self.weight) is not None),
                ("members", "≥ 1", self.members >= 1),
                ("max_tokens", "≥ 0", self.max_tokens >= 0),
                ("token_budget", "≥ 1", self.token_budget >= 1),
                ("timeout_s", "> 0", self.timeout_s > 0),
                ("threads", "≥ 0", self.threads >= 0),
                ("inputs", "'text' or 'ids'", self.inputs in get_args(Inputs)),
                ("precision", "'float32' or 'bfloat16'", self.precision in ("float32", "bfloat16")),
                ("name", "letters, digits and _", re.fullmatch(r"[A-Za-z]\w*", self.name, re.ASCII)),
            )
            if not right
        ]
        if faults:
            raise UsageError(f"RewardModel({self.model!r}): {'; '.join(faults)}")

    @property
    def role(self) -> str:
        """The name of the role whose members have the model."""
        return "REWARD" if self.name == "reward_model" else f"REWARD_{self.name.upper()}"

    def scores(self, row: Mapping[str, Any]) -> bool:
        """True if the reward is for this row."""
        return not self.sources or row.get("data_source") in self.sources

    def start(
        self,
        responses: Sequence[Response],
        rows: Sequence[Mapping[str, Any]],
        group: Callable[[str], Any] = RoleGroup,
        prompt_key: str = "prompt",
    ) -> Callable[[], list[Outcome]]:
        """Send responses to the role; returns a function that waits for their outcomes, in the same order.

        If the call fails, all these responses are `Failed`.

        Args:
            responses: the responses to score.
            rows: the row of each response.
            group: function from the name of a role to its members.
            prompt_key: the column of the prompts.
        """
        sent = [conversation(response, row, prompt_key) for response, row in zip(responses, rows, strict=True)]

        def failed(error: Exception) -> list[Outcome]:
            logger.warning("reward model %r failed on %d responses", self.name, len(sent), exc_info=error)
            return [Failed(f"{type(error).__name__}: {error}") for _ in sent]

        try:
            members = group(self.role).options(idempotent=True, timeout_s=self.timeout_s + GRACE_S)
            running = members.call_batch("score", len(sent), sent)
        except Exception as error:
            at_once = failed(error)
            return lambda: at_once

        def wait() -> list[Outcome]:
            try:
                return list(running)
            except Exception as error:
                return failed(error)

        return wait

    def faults(self, tokenizer: Any, row: Mapping[str, Any], prompt_key: str = "prompt") -> Iterator[str]:
        """One sentence per fault that can be found without loading the weights.

        Args:
            tokenizer: the tokenizer of the policy.
            row: row 0 of the data.
            prompt_key: the column of the prompts.
        """
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(self.model)
            own = AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            yield f"the model or its tokenizer cannot be loaded: {error}"
            return
        if lacking := _lacking(Path(self.model), config):
            yield (
                f"{self.model} has no trained head ({', '.join(lacking)}), so it is no reward model: train it as one "
                "first (examples/reward_model)"
            )
        else:
            try:
                self.label_of(config)
            except UsageError as error:
                yield str(error)
        if self.inputs == "ids":
            if own.get_vocab() != tokenizer.get_vocab():
                yield "inputs='ids', but its tokenizer has another vocabulary than the policy's: use inputs='text'"
        elif not isinstance(row.get(prompt_key, ""), str) and not own.chat_template:
            yield "the prompts are chat messages, but its tokenizer has no chat template"

    def label_of(self, config: Any) -> int | None:
        """The index of the label that is the reward; ``None`` for a model with one label.

        Raises:
            UsageError: the model has several labels and none of them is chosen, or the label does not exist.
        """
        count = int(config.num_labels)
        if count == 1:
            return None
        labels = {int(number): str(name) for number, name in (config.id2label or {}).items()}
        if isinstance(self.label, int) and 0 <= self.label < count:
            return self.label
        found = [number for number, name in labels.items() if name == self.label]
        if not found:
            raise UsageError(
                f"RewardModel({self.model!r}) has {count} labels: choose one by label=…, of "
                f"{', '.join(labels.values()) or range(count)}"
                + (f"; there is no {self.label!r}" if self.label is not None else "")
            )
        return found[0]


def _lacking(folder: Path, config: Any) -> list[str]:
    """The scoring head's parameters that a folder's weight files lack; empty if the folder has no safetensors files."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification

    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"])
    elif whole.is_file():
        with safe_open(whole, "pt") as file:
            names = set(file.keys())
    else:
        return []
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    body = f"{model.base_model_prefix}."
    return sorted(name for name in model.state_dict() if not name.startswith(body) and name not in names)


def conversation(response: Response, row: Mapping[str, Any], prompt_key: str = "prompt") -> Conversation:
    """The `Conversation` of a response and its row, whose column ``prompt_key`` has the prompt."""
    prompt: Any = row.get(prompt_key, response.prompt)
    extras = response.episode.extras
    if before := _before_response(extras.get("messages", ())):
        # Without a chat template, an environment's words are appended to the text; an agent writes its own messages.
        as_text = isinstance(prompt, str) and "result" not in extras
        prompt = "".join(str(one["content"]) for one in before) if as_text else before
    if not isinstance(prompt, str):
        prompt = [dict(message) for message in prompt]
    return Conversation(
        response.episode.ids,
        prompt,
        response.text,
        response.finish_reason == "stop",
        sum(turn.source == "policy" for turn in response.episode.turns),
    )


def _before_response(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages of an episode before the policy's last turn; empty if there is none."""
    places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
    return messages[: places[-1]] if places else ()

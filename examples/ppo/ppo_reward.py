"""The reward: 1 for exactly the right answer, ended by the policy itself; otherwise 0."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from rlmesh import RestartEvent, rpc

from . import remote_call
from .common import pretrained


def exact_match(text: str, ended: bool, answer: str) -> float:
    """The score of a response; ``ended`` is true if it stopped by the end token, not by the limit."""
    return float(ended and text == answer)


class RewardModelActor:
    def setup(self) -> None:
        self.tokenizer: PreTrainedTokenizerFast | None = None

    def on_restart(self, event: RestartEvent) -> None:
        self.init(str(pretrained()))

    @rpc(remote_call.reward_init)
    def init(self, model_path: str) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)

    @rpc(remote_call.reward_forward)
    def forward(self, token_ids: Sequence[list[int]], answers: Sequence[str]) -> list[float]:
        assert self.tokenizer is not None, "reward_forward before reward_init"
        end = self.tokenizer.eos_token_id
        scores = []
        for tokens, answer in zip(token_ids, answers, strict=True):
            ended = tokens[-1:] == [end]
            text = "".join(self.tokenizer.convert_ids_to_tokens(tokens[:-1] if ended else tokens))
            scores.append(exact_match(text, ended, answer))
        return scores

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.tokenizer = None

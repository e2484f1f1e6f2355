"""A tokenizer of characters with a chat template, and an engine that says what a function tells it to say."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlmesh.rl.engines.rollout import OnTokens, Sample, SamplingParams

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>{% endif %}{{ message['content'] }}",
)
"""As templates of thinking models: the last turn of the assistant is formatted in another way than earlier ones."""
LAST_USER = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'user' and loop.index0 == messages | length - 1 %}[last]{% endif %}{{ message['content'] }}",
)
"""As some templates that put instructions before the last message: a later message changes the text of earlier ones."""
PAIRS = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message['content'] }}]{% endfor %}"
)


def make_tokenizer(template: str | None = CHATML) -> Any:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    # In bytes, as the decoder of Qwen2's tokenizer class takes them, which is used for a folder with such a model.
    words = [*SPECIAL, *string.printable[:94], "Ġ", "Ċ"]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    letters = Split(Regex("(?m)."), "isolated")
    tokenizer.pre_tokenizer = Sequence([letters, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    made.chat_template = template
    made.name_or_path = "letters"
    return made


class ScriptedEngine:
    """Answers at once, unless its function waits.

    Args:
        say: (text of all tokens so far, parameters) → the text of the response; an end token follows.
    """

    def __init__(self, tokenizer: Any, say: Callable[[str, SamplingParams], str], version: int = 7) -> None:
        self.tokenizer, self.say, self.version = tokenizer, say, version
        self.asked: list[list[int]] = []
        self.cancelled = 0
        self._lock = threading.Lock()

    def text(self, ids: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return found

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout_s: float = 600.0,
        on_tokens: OnTokens | None = None,
    ) -> Future[Sample]:  # fmt: skip
        with self._lock:
            self.asked.append(list(prompt))
        future: Future[Sample] = Future()

        def cancelled(done: Future[Sample]) -> None:
            self.cancelled += done.cancelled()

        future.add_done_callback(cancelled)
        said = self.say(self.text(prompt), params)
        if said == "<never>":
            return future
        ids = [*self.tokenizer(said, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        reason = "stop"
        for text in params.stop:
            if (place := said.find(text)) >= 0:
                ids = ids[: place + len(text)]
        if len(ids) > params.max_tokens:
            ids, reason = ids[: params.max_tokens], "length"
        numbers = [-0.25 - place / 64 for place in range(len(ids))]
        if on_tokens is not None:
            for token, number in zip(ids, numbers, strict=True):
                on_tokens([token], [number])
        if future.set_running_or_notify_cancel():
            future.set_result(Sample.of(prompt, ids, numbers, self.version, reason))  # type: ignore[arg-type]
        return future

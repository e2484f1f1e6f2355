"""`ChatSpans`: new messages are appended, and recorded ids stay."""

from __future__ import annotations

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from tests.rl.turns.scripted import CHATML, LAST_USER, PAIRS, THINKING, make_tokenizer

PROMPT = [{"role": "user", "content": "2+2?"}]
ANSWER = [{"role": "tool", "content": "4"}]


def test_the_ids_are_those_of_the_template() -> None:
    tokenizer = make_tokenizer()
    spans = ChatSpans(tokenizer)
    turn = [*spans.text("call"), tokenizer.eos_token_id]
    ids = [*spans.prompt(PROMPT), *turn, *spans.extension(PROMPT, turn, ANSWER)]
    whole = tokenizer.apply_chat_template(
        [*PROMPT, {"role": "assistant", "content": "call"}, *ANSWER], add_generation_prompt=True, return_dict=True
    )
    assert ids == list(whole["input_ids"])


def test_a_turn_that_was_cut_off_is_ended() -> None:
    tokenizer = make_tokenizer()
    spans = ChatSpans(tokenizer)
    cut = spans.text("cal")
    assert spans.decode(spans.extension(PROMPT, cut, ANSWER)).startswith("<|im_end|>\n<|im_start|>tool\n4<|im_end|>")
    whole = [*cut, tokenizer.eos_token_id]
    assert spans.decode(spans.extension(PROMPT, whole, ANSWER)).startswith("\n<|im_start|>tool\n4<|im_end|>")


def test_earlier_turns_may_be_formatted_differently() -> None:
    """A template of a thinking model: only the text after the turn is used, and the turn's own ids stay."""
    spans = ChatSpans(make_tokenizer(THINKING))
    spans.check(PROMPT, ["user", "tool"])
    assert spans.decode(spans.extension(PROMPT, [], ANSWER)) == ChatSpans(make_tokenizer(CHATML)).decode(
        ChatSpans(make_tokenizer(CHATML)).extension(PROMPT, [], ANSWER)
    )


def test_tools_are_in_the_prompt_and_not_in_the_extension() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    spans = ChatSpans(make_tokenizer(), tools)
    assert '"add"' in spans.decode(spans.prompt(PROMPT))
    assert "add" not in spans.decode(spans.extension(PROMPT, [], ANSWER))


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (LAST_USER, "user", "letters cannot be extended by appending: a message of user after a turn"),
        (PAIRS, "tool", "letters refuses messages of user, assistant, tool: roles must alternate"),
        (CHATML.replace("{{ message['content'] }}", "-"), "user", "a turn of the assistant appears 0 times"),
        (None, "user", "the tokenizer letters has no chat template"),
    ],
)
def test_a_template_that_cannot_be_extended_is_refused_by_name(template: str | None, role: str, said: str) -> None:
    spans = ChatSpans(make_tokenizer(template))
    with pytest.raises(UsageError) as raised:
        spans.check(PROMPT, [role])
    assert said in str(raised.value)


def test_the_text_of_a_turn_has_no_end_token() -> None:
    tokenizer = make_tokenizer()
    spans = ChatSpans(tokenizer)
    assert spans.said([*spans.text("ab"), tokenizer.eos_token_id]) == "ab"
    assert spans.said(spans.text("ab")) == "ab" and spans.said([]) == ""

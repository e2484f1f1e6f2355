"""Reward models: what they read, how they score, and how they fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rewards import Reward, RewardModel, Rewards
from rlmesh.rl.rewards.model import Conversation, conversation
from rlmesh.rl.rewards.reward import Response
from rlmesh.rl.types import Episode, Failed, Group, Outcome, Score, Turn
from tests.rl.tiny import TEMPLATE, WORDS, make_config, make_reward_model, make_tokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("plain"))


def said(prompt: Any, response: str, *, ended: bool = True, turns: int = 1) -> Conversation:
    text = (prompt if isinstance(prompt, str) else "") + response
    ids = np.asarray([WORDS.index(letter) for letter in text] + [1] * ended, np.int32)
    return Conversation(ids, prompt, response, ended, turns)


def values(outcomes: list[Outcome]) -> list[float]:
    return [outcome.value for outcome in outcomes if isinstance(outcome, Score)]


def test_scores_are_the_models_outputs_in_any_batch(plain: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    from rlmesh.rl.roles.reward import ModelScorer

    texts = ["a", "abcdefgh" * 3, "bb", "h" * 11, "abc", "gfedcba"]
    sent = [said("ab>", text) for text in texts]
    scorer = ModelScorer(RewardModel(str(plain)))
    found = values(scorer.score(sent))
    model = AutoModelForSequenceClassification.from_pretrained(plain).eval()
    with torch.no_grad():
        alone = [float(model(torch.tensor([one.ids.tolist()])).logits[0, 0]) for one in sent]
    assert found == pytest.approx(alone, abs=1e-5) and len(set(found)) == len(texts)
    for budget in (1, 20, 40):
        assert values(ModelScorer(RewardModel(str(plain), token_budget=budget)).score(sent)) == pytest.approx(
            alone, abs=1e-5
        )
    # The tokens as they were sampled are the same here.
    assert values(ModelScorer(RewardModel(str(plain), inputs="ids")).score(sent)) == pytest.approx(alone, abs=1e-5)
    assert values(scorer.score([said("ab>", "a", ended=False)])) != pytest.approx(alone[:1], abs=1e-5)


def test_rewards_of_a_model_in_bfloat16_are_not_rounded_to_it(plain: Path) -> None:
    import torch

    from rlmesh.rl.roles.reward import ModelScorer

    sent = [said("a>", "bcd"[: 1 + number % 3] * (1 + number // 3)) for number in range(9)]
    scorer = ModelScorer(RewardModel(str(plain), precision="bfloat16"))
    found = torch.tensor(values(scorer.score(sent)))
    assert (found != found.bfloat16().float()).float().mean() > 0.5
    assert {weight.dtype for weight in scorer.model.parameters()} == {torch.bfloat16}


def test_a_model_without_padding_scores_row_by_row(tmp_path: Path, plain: Path) -> None:
    import torch
    from transformers import Qwen2ForSequenceClassification

    from rlmesh.rl.roles.reward import ModelScorer

    tokenizer = make_tokenizer(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(make_config(num_labels=1, pad_token_id=None)).save_pretrained(tmp_path)
    sent = [said("ab>", text) for text in ("a", "abc", "aa")]
    expected = values(ModelScorer(RewardModel(str(plain))).score(sent))
    assert len(set(values(ModelScorer(RewardModel(str(tmp_path))).score(sent)))) == 3 == len(set(expected))


def test_chat_messages_go_through_the_models_own_template(tmp_path: Path) -> None:
    from rlmesh.rl.roles.reward import ModelScorer

    scorer = ModelScorer(RewardModel(str(make_reward_model(tmp_path, template=TEMPLATE))))
    ids = scorer.encode(said([{"role": "user", "content": "ab"}], "cd"))
    assert [WORDS[i] for i in ids] == ["a", "b", ">", "c", "d", ">"]  # type: ignore[union-attr]
    several = scorer.encode(said([{"role": "user", "content": "ab"}], "cd", turns=2))
    assert isinstance(several, Failed) and "2 turns" in several.reason


def test_one_of_several_labels_is_the_reward(tmp_path: Path) -> None:
    from rlmesh.rl.roles.reward import ModelScorer

    folder = make_reward_model(tmp_path, labels=3)
    with pytest.raises(UsageError, match=r"has 3 labels: choose one by label=…, of LABEL_0, LABEL_1, LABEL_2"):
        ModelScorer(RewardModel(str(folder)))
    with pytest.raises(UsageError, match="there is no 'good'"):
        ModelScorer(RewardModel(str(folder), label="good"))
    shares = [
        values(ModelScorer(RewardModel(str(folder), label=label)).score([said("a>", "bc")]))[0]
        for label in ("LABEL_0", 1, "LABEL_2")
    ]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0


def test_what_is_too_long_or_too_late_fails_and_is_not_cut(plain: Path) -> None:
    from rlmesh.rl.roles.reward import ModelScorer

    scorer = ModelScorer(RewardModel(str(plain), max_tokens=5))
    short, long = scorer.score([said("a>", "bb"), said("a>", "bbb")])
    assert isinstance(short, Score)
    assert long == Failed("the reward model reads 1 to 5 tokens, got 6")
    assert ModelScorer(RewardModel(str(plain))).max_tokens == 64
    (late,) = ModelScorer(RewardModel(str(plain), timeout_s=1e-9)).score([said("a>", "b")])
    assert isinstance(late, Failed) and late.reason.startswith("timeout")


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    from rlmesh.rl.roles.reward import ModelScorer

    tokenizer = make_tokenizer(tmp_path)
    Qwen2ForCausalLM(make_config()).save_pretrained(tmp_path)
    model = RewardModel(str(tmp_path))
    (fault,) = model.faults(tokenizer, {"prompt": "a"})
    assert "has no trained head (score.weight), so it is no reward model" in fault
    with pytest.raises(UsageError, match=r"lack score\.weight, and would be random"):
        ModelScorer(model)


def test_faults_are_found_without_weights(tmp_path: Path, plain: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "policy", words=[*WORDS, "x"])
    chat = {"prompt": [{"role": "user", "content": "a"}]}
    assert [*RewardModel(str(plain)).faults(tokenizer, {"prompt": "a"})] == []
    (fault,) = RewardModel(str(plain)).faults(tokenizer, chat)
    assert "no chat template" in fault
    (fault,) = RewardModel(str(plain), inputs="ids").faults(tokenizer, chat)
    assert "another vocabulary" in fault
    (fault,) = RewardModel(str(tmp_path / "none")).faults(tokenizer, chat)
    assert "cannot be loaded" in fault
    with pytest.raises(UsageError, match=r"members=0 must be ≥ 1; timeout_s=0 must be > 0; name=a-b must be letters"):
        RewardModel("x", members=0, timeout_s=0, name="a-b")


ASKED: list[Any] = []


class Answers(RewardModel):
    """A reward model whose role is this process."""

    def start(self, responses: Any, rows: Any, group: Any = None, prompt_key: str = "prompt") -> Any:
        ASKED.append(conversation(responses[0], rows[0], prompt_key).prompt)
        found = [Score(float(len(response.text))) for response in responses]
        return lambda: found


class Letters:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(WORDS[i] for i in token_ids if i > 1 or not skip_special_tokens)


def episode(text: str) -> Episode:
    ids = np.asarray([*map(WORDS.index, text), 1], np.int32)
    return Episode(
        (Turn.said([2]), Turn(ids, "policy", np.zeros(len(ids), np.float32), version_spans=((0, 0, len(ids)),)))
    )


def test_a_model_is_one_of_the_rewards_of_a_batch() -> None:
    groups = [
        Group((0, 0), (episode("bc"), episode("c")), {"prompt": "a", "data_source": "helpful"}),
        Group((0, 1), (episode("ccc"),), {"prompt": "a", "data_source": "other"}),
    ]
    rewards = Rewards(
        [Answers("m", weight=2.0, sources=("helpful",)), Reward(lambda response: 1.0, name="one", inline=True)],
        Letters(),
    )
    scored = rewards.score(groups)
    totals = [rewards.total(each) for each in Group.episodes_of(scored)]
    assert [outcome.value for outcome in totals if isinstance(outcome, Score)] == [5.0, 3.0, 1.0]
    assert rewards.metrics(scored)["reward/reward_model"] == 1.5
    response = rewards.response(groups[0].episodes[0])
    sent = conversation(response, groups[0].row)
    assert (sent.prompt, sent.response, sent.ended, sent.turns) == ("a", "bc", True, 1)
    assert sent.ids.tolist() == [2, 3, 4, 1]


def test_a_model_reads_the_prompts_of_the_column_that_the_run_names() -> None:
    row = {"question": [{"role": "user", "content": "a"}], "prompt": "another column"}
    Rewards([Answers("m")], Letters(), prompt_key="question").score([Group((0, 0), (episode("b"),), row)])
    assert ASKED[-1] == row["question"]


USER, SAID = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
POLICY, OTHER = {"role": "assistant", "content": "c"}, {"role": "assistant", "content": "d"}


@pytest.mark.parametrize(
    ("prompt", "extras", "read"),
    [
        # An environment said something before the only turn of the policy, in a chat or in a text, and after it.
        ([USER], {"messages": [USER, SAID, POLICY]}, [USER, SAID]),
        ([USER], {"messages": [USER, SAID, POLICY, SAID]}, [USER, SAID]),
        ("a", {"messages": [USER, SAID, POLICY]}, "ab"),
        ("a", {"messages": [USER, POLICY]}, "a"),
        # An agent wrote messages of its own; this branch goes on after a turn that is trained in another branch.
        ("a", {"messages": [SAID, OTHER, USER, POLICY], "result": 1.0}, [SAID, OTHER, USER]),
        ([USER], {"result": 1.0}, [USER]),
    ],
)
def test_a_model_reads_what_was_said_before_the_response(prompt: Any, extras: dict[str, Any], read: Any) -> None:
    response = Response([4], "c", "a", replace(episode("c"), extras=extras))
    assert conversation(response, {"prompt": prompt}).prompt == read


def test_a_role_that_does_not_answer_fails_its_responses_only() -> None:
    response = Response([3], "b", "a", episode("b"))
    (outcome,) = RewardModel("m").start([response], [{"prompt": "a"}])()
    assert isinstance(outcome, Failed)

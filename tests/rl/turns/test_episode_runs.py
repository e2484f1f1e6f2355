"""Runs with tools, an environment or an agent: faults before any process starts, engines that die, and learning."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import PeerLost, UsageError, WeightsNotReady
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.packing import pack, same_prompts
from rlmesh.rl.rewards import Reward
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.rollout.episodes import EpisodeSettings, TurnResult, episode_return
from rlmesh.rl.rollout.episodes.spreading import EpisodeSpread, episode_report
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.rollout.episodes.turn_sampler import TurnSampler
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from rlmesh.rl.types import Episode, Failed, Group, Score, Turn
from tests.rl.tiny import make_config
from tests.rl.turns.episode_runs import make
from tests.rl.turns.scripted import LAST_USER, make_tokenizer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
CHAT = [{"prompt": [{"role": "user", "content": "abcd"[place % 4]}]} for place in range(32)]
TEXTS = [{"prompt": "abcd"[place % 4]} for place in range(32)]


class Letters:
    """An environment that answers twice, and rewards every a."""

    def reset(self, row: Mapping[str, Any]) -> str:
        self.turns = 0
        return "go"

    def step(self, action: str) -> TurnResult:
        self.turns += 1
        return TurnResult("more", reward=action.count("a") / 4, done=self.turns == 3)


class Shy(Letters):
    def reset(self, row: Mapping[str, Any]) -> str:
        raise LookupError("no game today")


class Needy(Letters):
    def __init__(self, level: int) -> None:
        self.level = level


class Half:
    def reset(self, row: Mapping[str, Any]) -> None:
        pass


def search(query: str, limit: int = 3) -> str:
    """Find texts."""
    return query * limit


def agent(base_url: str, row: Mapping[str, Any]) -> float:
    return 1.0


def deaf_agent(row: Mapping[str, Any]) -> float:
    return 1.0


def misspelt_agent(base_ulr: str) -> float:
    return 1.0


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": "nowhere", "data": "nowhere.jsonl", "rewards": [episode_return], "algorithm": GRPO(samples=4),
    } | changes  # fmt: skip


WRONG: Any = "ignore"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": Letters, "tools": [search]}, "environment and tools: an episode has one of them"),
        ({"environment": Letters()}, "give its class, so that each episode has an environment of its own"),
        ({"environment": Needy}, "environment=Needy is made without arguments, and needs level"),
        ({"environment": Half}, "environment=Half has no method step"),
        ({"tools": [search, search]}, "tools: two tools are named search"),
        ({"tools": ["search"]}, "tools: a tool is a function, got str"),
        ({"agent": "solve"}, "agent='solve' is no function"),
        ({"agent": deaf_agent}, "agent=deaf_agent has no parameter base_url"),
        ({"agent": misspelt_agent}, "; did you mean 'base_url'?"),
        ({"episode": EpisodeSettings(max_turns=0)}, "episode.max_turns=0 must be ≥ 1"),
        ({"episode": EpisodeSettings(turn_timeout_s=0)}, "episode.turn_timeout_s=0 must be a number of seconds"),
        ({"episode": EpisodeSettings(tool_errors=WRONG)}, "tool_errors='ignore' must be one of 'message', 'fail'"),
        ({"episode": EpisodeSettings(tool_calls="json")}, "episode.tool_calls='json': write 'hermes'"),
    ],
)
def test_faults_of_episodes_are_told_with_the_other_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Run(**settings(steps=0, **changes))
    assert said in str(raised.value) and "steps=0 must be" in str(raised.value)


def test_a_file_names_tools_environments_and_agents() -> None:
    here = "tests.rl.turns.test_episode_runs"
    values = settings(algorithm={"name": "grpo"}, rewards=["rlmesh.rl.rollout.episodes:episode_return"])
    assert Run.from_config({**values, "environment": f"{here}:Letters"}).environment is Letters
    run = Run.from_config({**values, "tools": [f"{here}:search"], "episode": {"max_turns": 3}})
    assert run.tools == [search] and run.episode.max_turns == 3
    with pytest.raises(UsageError) as raised:
        Run.from_config({**values, "agent": f"{here}:agnet", "episode": {"max_turn": 3}})
    assert "agent: " in str(raised.value) and "did you mean 'agent'?" in str(raised.value)
    assert "did you mean episode.max_turns?" in str(raised.value)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model with a tokenizer of characters."""
    import torch
    from transformers import Qwen2ForCausalLM

    def make(template: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("chatty")
        tokenizer = make_tokenizer(template) if template else make_tokenizer()
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "eos_token_id": 2}
        Qwen2ForCausalLM(make_config(**sizes)).save_pretrained(folder)
        return folder

    return make


def small(folder: Path, **changes: Any) -> Run:
    return Run(
        **settings(
            model=str(folder), data=CHAT, batch_size=4, steps=2, actor=ActorSettings(lr=1e-2),
            rollout=RolloutSettings(max_tokens=4), episode=EpisodeSettings(max_tokens=150),
        )
        | changes
    )  # fmt: skip


def test_a_template_or_an_environment_that_fails_is_told_before_the_run(chatty: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"letters|chatty") as raised:
        small(chatty(LAST_USER), environment=Shy).check()
    assert "cannot be extended by appending" in str(raised.value)
    assert "environment: row 0 turn 0 environment Shy: LookupError: no game today" in str(raised.value)
    small(chatty(), environment=Letters).check()
    with pytest.raises(UsageError, match="are more than the 256 positions of the model: lower it"):
        small(chatty(), environment=Letters, episode=EpisodeSettings(max_tokens=256)).check()


def test_tools_are_described_in_the_prompts(chatty: Callable[..., Path]) -> None:
    run = small(chatty(), tools=[search])
    tokenizer = run.tokenizer()
    text = tokenizer.decode(run.dataset(tokenizer)[0].ids.tolist())
    schema = json.loads(text.partition("system\n")[2].partition("<|im_end|>")[0])[0]["function"]
    assert schema["parameters"] == {
        "type": "object", "required": ["query"],
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    }  # fmt: skip
    assert schema["description"] == "Find texts."
    assert run.response_tokens == 150 and small(chatty()).response_tokens == 4


def episode(prompt: list[int], *, failure: str = "", policy: int = 1, **extras: Any) -> Episode:
    ids = np.arange(3, 3 + policy, dtype=np.int32)
    turn = Turn(ids, "policy", np.zeros(policy, np.float32), version_spans=((0, 0, policy),))
    return Episode((Turn.said(prompt), turn) if policy else (Turn.said(prompt),), extras=extras, failure=failure)


class Greets:
    """Says something before the only turn."""

    tokens = False

    def reset(self, row: Mapping[str, Any]) -> Any:
        return "bc>"

    def step(self, action: Any) -> TurnResult:
        return TurnResult(reward=float(len(action)), done=True)


class GreetsInTokens(Greets):
    tokens = True

    def reset(self, row: Mapping[str, Any]) -> Any:
        return [3, 4, 10]


@pytest.mark.parametrize("environment", [Greets, GreetsInTokens])
def test_a_greedy_response_has_the_prompt_of_the_others(
    environment: type[Greets], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of an episode has the first words of its environment, which says them again to the greedy response."""
    asked: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    sample = TurnSampler.sample

    async def noted(self: TurnSampler, ids: Any, params: SamplingParams, **options: Any) -> Any:
        asked[params.temperature == 0].add(tuple(ids))
        return await sample(self, ids, params, **options)

    monkeypatch.setattr(TurnSampler, "sample", noted)
    algorithm = GRPO(samples=2, advantage="remax")
    run = make(tiny, "environment", environment=environment, algorithm=algorithm, batch_size=4, steps=2)
    run.here(run_dir=tmp_path / "run")
    assert len(asked[True]) == 4 and asked[True] == asked[False]


def test_a_failed_episode_has_no_score_and_is_counted() -> None:
    scorer = Rewards([Reward(episode_return, inline=True)], make_tokenizer())
    try:
        given = [episode([5], **dict[str, Any]({"return": 2.0})), episode([5], failure="episode 1: lost"), episode([5])]
        (group,) = scorer.score([Group((0,), tuple(given))])
    finally:
        scorer.close()
    outcomes = [one.outcomes["episode_return"] for one in group.episodes]
    assert outcomes[:2] == [Score(2.0), Failed("episode 1: lost")]
    assert scorer.metrics([group])["reward_failed"] == pytest.approx(1 / 3)


def test_episodes_of_a_group_may_have_other_prompts_and_no_turn_of_the_policy() -> None:
    episodes = [episode([5, 6]), episode([5, 6], policy=2), episode([7]), episode([7], policy=0)]
    alike = same_prompts(episodes, [0, 0, 0, 1])
    assert alike == [0, 0, 1, 2]
    packs = pack(episodes, groups=alike, token_budget=100).by_rank[0]
    targets = np.concatenate([one.targets for one in packs])
    assert sorted(targets.tolist()) == [3, 3, 3, 4]


class Engines:
    """Two engines, one of which dies or has no weights at the first call."""

    def __init__(self, *errors: Exception | None, both: bool = False) -> None:
        self.errors, self.both, self.calls = list(errors), both, list[list[list[int]]]()

    def __len__(self) -> int:
        return 2

    def options(self, **_: Any) -> Engines:
        return self

    def call(self, method: str, parts: list[list[EpisodeTask]], params: Any, *, _scatter: bool) -> Future[list[Any]]:
        assert method == "make_episodes" and _scatter
        self.calls.append([[task.number for task in part] for part in parts])
        first = [[episode(task.prompt.tolist(), turns=task.seed)] for task in parts[0]]
        second = [[episode(task.prompt.tolist(), turns=task.seed)] for task in parts[1]]
        error = self.errors.pop(0) if self.errors else None
        future: Future[list[Any]] = Future()
        future.set_result([(error if self.both else None) or first, error or second])
        return future


def spread(engines: Engines) -> tuple[list[list[Episode]], int]:
    pushes: list[int] = []
    prompts = [[5 + number] for number in range(5)]
    made = EpisodeSpread(lambda: engines, lambda: pushes.append(1)).make(prompts, [{}] * 5, SamplingParams(4, seed=9))
    return made, len(pushes)


@pytest.mark.parametrize("error", [PeerLost("gone"), WeightsNotReady("none")])
def test_episodes_of_an_engine_that_died_are_made_again(error: Exception) -> None:
    expected, _ = spread(Engines())
    engines = Engines(error, error)
    episodes, pushes = spread(engines)
    assert engines.calls == [[[0, 2, 4], [1, 3]], [[1], [3]], [[3], []]] and pushes == 2
    # An episode that is made again has the same seed, whichever engine makes it.
    assert [one.extras for (one,) in episodes] == [one.extras for (one,) in expected]


def test_episodes_of_groups_are_numbered_through_the_run() -> None:
    tasks = EpisodeTask.of(GroupRequest(6, [5, 6], (11, 12, 13), {"a": 1}))
    assert [(task.number, task.seed, task.row) for task in tasks] == [(18 + n, 11 + n, {"a": 1}) for n in range(3)]
    assert tasks[1].name == "episode 19" and tasks[1].prompt.tolist() == [5, 6]


def test_the_report_has_the_numbers_of_episodes() -> None:
    episodes = (episode([5], turns=3), episode([5], turns=1, failure="lost"), episode([5], turns=2, branch=1))
    assert episode_report([Group((0,), episodes)]) == {
        "episodes/turns": 2, "episodes/failed": pytest.approx(1 / 3), "episodes/branches": 1,
    }  # fmt: skip


def test_engines_that_die_again_and_again_end_the_run_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="of 5 episodes were not played"):
        spread(Engines(*[PeerLost("gone")] * 9, both=True))
    with pytest.raises(UsageError, match="beyond the vocabulary"):
        spread(Engines(UsageError("beyond the vocabulary")))


def reported(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward_mean" in line]


class Dies(Letters):
    """Kills its engine once, in the second step of a run."""

    def step(self, action: str) -> TurnResult:
        flag = Path(os.environ["RLMESH_TEST_FLAG"])
        lives = len(list(flag.parent.glob("life*")))
        if flag.exists() and lives < 1:
            (flag.parent / "life1").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def mark_step(sample: Any) -> float:
    """The return; marks that a step was scored."""
    Path(os.environ["RLMESH_TEST_FLAG"]).touch()
    found = sample.episode.extras.get("return")
    return 0.0 if found is None else float(found)


@pytest.mark.slow
def test_a_run_goes_on_after_an_engine_dies_within_its_episodes(
    chatty: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLMESH_TEST_FLAG", str(tmp_path / "scored"))
    folder = chatty()
    (tmp_path / "scored").unlink(missing_ok=True)
    run = small(
        folder, environment=Dies, rewards=[mark_step], steps=3, rollout=RolloutSettings(engines=2, max_tokens=4)
    )
    run_dir = run.submit("dies", view="plain").run_dir
    steps = reported(run_dir)
    assert len(steps) == 3 and (tmp_path / "life1").exists()
    assert sum(step["buffer/asked_again"] for step in steps) > 0
    assert all(step["episodes/turns"] == 3 and step["episodes/failed"] == 0 for step in steps)
    assert all(step["drift_alarm"] == 0 for step in steps)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {"tiny", "calculator", "sticks", "agent"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture(scope="module")
def multiplies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the calculator example."""
    folder = tmp_path_factory.mktemp("multiplies")
    sys.path.insert(0, str(EXAMPLES))
    try:
        importlib.import_module("tiny").main("calculator", folder)
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("tiny", None)
    return folder


@pytest.mark.slow
def test_a_policy_learns_to_use_a_calculator(example: Any, multiplies: Path, tmp_path: Path) -> None:
    run = example("calculator").make(str(multiplies), ["--set", "steps=10"])
    steps = reported(run.here(run_dir=tmp_path / "run").run_dir)
    first, last = (np.mean([step["reward_mean"] for step in part]) for part in (steps[:2], steps[-3:]))
    assert last > first + 0.25 and steps[-1]["episodes/turns"] > steps[0]["episodes/turns"] + 0.4
    # The trainer computes the log-probabilities that the engine sampled with: no token is masked wrongly.
    assert all(step["drift_alarm"] == 0 and abs(step["ratio_mean"] - 1) < 1e-3 for step in steps)


@pytest.mark.slow
def test_a_policy_learns_a_text_game(example: Any, tmp_path: Path) -> None:
    example("tiny").main("sticks", tmp_path / "model")
    run = example("sticks").make(str(tmp_path / "model"), ["--set", "steps=14"])
    steps = reported(run.here(run_dir=tmp_path / "run").run_dir)
    first, last = (np.mean([step["reward_mean"] for step in part]) for part in (steps[:2], steps[-3:]))
    assert last > first + 0.2
    assert all(step["drift_alarm"] == 0 and abs(step["ratio_mean"] - 1) < 1e-3 for step in steps)


def train_agent(example: Any, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Any]:
    pytest.importorskip("openai")
    monkeypatch.chdir(folder)
    run = example("agent").make(str(model), [word for one in words for word in ("--set", one)])
    steps = reported(run.submit("agent", view="plain").run_dir)
    assert all(step["episodes/failed"] < 0.1 and step["grad_norm"] > 0 for step in steps)
    # What the endpoint recorded is what the engine sampled: the trainer finds the same log-probabilities.
    assert all(step["drift_alarm"] == 0 and abs(step["ratio_mean"] - 1) < 1e-3 for step in steps)
    return steps


@pytest.mark.slow
def test_an_agent_that_takes_a_base_url_is_trained_as_it_is(
    example: Any, multiplies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = train_agent(example, multiplies, tmp_path, monkeypatch, "steps=2", "batch_size=4")
    assert len(steps) == 2 and steps[0]["episodes/turns"] > 1


@pytest.mark.slow
@pytest.mark.soak
def test_the_policy_of_an_agent_learns(
    example: Any, multiplies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = train_agent(example, multiplies, tmp_path, monkeypatch, "steps=8", "batch_size=8")
    assert np.mean([step["reward_mean"] for step in steps[-2:]]) > steps[0]["reward_mean"] + 0.15

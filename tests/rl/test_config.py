"""Runs from files, mappings, dataclasses, OmegaConf and Hydra, and `rlmesh train`."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms import GRPO, PPO, Algorithm, ReinforcePlusPlus
from rlmesh.rl.algorithms.grpo import Advantage, Loss
from rlmesh.rl.correction import Correction
from rlmesh.rl.faults import keys_of
from rlmesh.rl.rewards import Reward
from rlmesh.rl.trainers.config_reader import read_run
from rlmesh.rl.trainers.named import ALGORITHMS, REWARDS, find_algorithm, find_reward
from rlmesh.rl.trainers.other_names import ELSEWHERE
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.rl.run_job import is_a

GOOD: dict[str, Any] = {
    "model": "some/model",
    "data": "train.jsonl",
    "rewards": [{"function": "rlmesh.rl.rewards.gsm8k:compute_score", "weight": 0.5}, "exact"],
    "algorithm": {"name": "grpo", "samples": 4, "correction": {"level": "sequence", "upper": 3}, "overlong": [20, 5]},
    "steps": 7,
    "actor": {"lr": 2e-6, "ranks": 2},
    "rollout": {"max_tokens": 9},
}


def require_good(run: Run) -> None:
    assert isinstance(run.algorithm, GRPO)
    assert (run.algorithm.samples, run.algorithm.correction) == (4, Correction("sequence", 3))
    assert run.algorithm.overlong == (20, 5)
    assert [(one.name, one.weight) for one in run.scored] == [("gsm8k", 0.5), ("exact", 1.0)]
    assert (run.steps, run.actor.lr, run.actor.ranks, run.rollout.max_tokens) == (7, 2e-6, 2, 9)


# Sources.


def test_a_mapping_is_a_run() -> None:
    require_good(Run.from_config(GOOD))
    assert Run.from_config({**GOOD, "rollout": "vllm"}).rollout.engine == "vllm"
    assert Run.from_config({**GOOD, "algorithm": "reinforce++"}).algorithm == ReinforcePlusPlus()
    alone = Run.from_config({**GOOD, "algorithm": GRPO(samples=2), "rewards": is_a, "actor": ActorSettings(ranks=3)})
    reward = alone.scored[0]
    assert isinstance(reward, Reward)
    assert (alone.algorithm, reward.function, alone.actor.ranks) == (GRPO(samples=2), is_a, 3)


def test_overrides_come_last_and_make_sections() -> None:
    run = Run.from_config(
        {**GOOD, "algorithm": "grpo"},
        ["actor.lr=1e-3", "algorithm.samples=6", "rollout=vllm", "rollout.max_tokens=5", "train=fsdp2"],
    )
    assert (run.actor.lr, run.actor.ranks, run.algorithm.samples, run.train) == (1e-3, 2, 6, "fsdp2")
    assert (run.rollout.engine, run.rollout.max_tokens) == ("vllm", 5)


@pytest.mark.parametrize(
    "algorithm", [GRPO(samples=2, loss="cispo", overlong=(64, 16)), PPO(lam=0.9)], ids=["grpo", "ppo"]
)
def test_overrides_change_an_algorithm_that_was_given_whole(algorithm: Any) -> None:
    run = Run.from_config({**GOOD, "algorithm": algorithm}, ["algorithm.clip_high=0.3", "actor.lr=1e-3"])
    assert run.algorithm == replace(algorithm, clip_high=0.3) and run.algorithm.policy_loss == algorithm.policy_loss
    assert run.actor.lr == 1e-3


@dataclass
class Sampling:
    max_tokens: int = 9


@dataclass
class Settings:
    """A user's own dataclass; sections are dataclasses, mappings, or those of the library."""

    model: str = "some/model"
    data: str = "train.jsonl"
    rewards: list[Any] = field(default_factory=lambda: GOOD["rewards"])
    algorithm: dict[str, Any] = field(default_factory=lambda: GOOD["algorithm"])
    steps: int = 7
    actor: ActorSettings = field(default_factory=lambda: ActorSettings(lr=2e-6, ranks=2))
    rollout: Sampling = field(default_factory=Sampling)


def test_a_dataclass_is_a_run() -> None:
    require_good(Run.from_config(Settings()))


@dataclass
class Structured(Settings):
    """As Hydra's users write it; OmegaConf 2.3 takes no dataclass with a Literal."""

    actor: dict[str, Any] = field(default_factory=lambda: GOOD["actor"])  # type: ignore[assignment]


def test_omegaconf_is_a_run_with_its_references() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({**GOOD, "validation": "${data}"})
    run = Run.from_config(config, ["steps=7"])
    require_good(run)
    assert run.validation == "train.jsonl"
    require_good(Run.from_config(omegaconf.OmegaConf.structured(Structured)))
    with pytest.raises(UsageError, match=r"OmegaConf cannot give.*steps"):
        Run.from_config(omegaconf.OmegaConf.create({**GOOD, "steps": "???"}))


def test_files_are_runs(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    (tmp_path / "run.json").write_text(json.dumps(GOOD))
    omegaconf.OmegaConf.save(omegaconf.OmegaConf.create(GOOD), tmp_path / "run.yaml")
    for name in ("run.json", "run.yaml"):
        require_good(Run.from_config(tmp_path / name))
    # YAML 1.1 takes 1e-6 for a text; here it is the number that it looks like.
    (tmp_path / "lr.yaml").write_text("model: m\ndata: d\nrewards: [exact]\nalgorithm: grpo\nactor: {lr: 1e-6}\n")
    assert Run.from_config(tmp_path / "lr.yaml").actor.lr == 1e-6


def test_a_python_file_defines_run_and_its_functions_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_training.py").write_text(
        textwrap.dedent("""
            import sys
            from rlmesh.rl.algorithms import GRPO
            from rlmesh.rl.trainers.run import Run

            def longer(response):
                return float(len(response))

            run = Run.from_args(model="m", data="d", rewards=[longer], algorithm=GRPO())

            if __name__ == "__main__":
                sys.exit("this must not run")
        """)
    )
    run = Run.from_config(tmp_path / "my_training.py", ["steps=3"])
    reward = run.scored[0]
    assert isinstance(reward, Reward)
    assert run.steps == 3 and reward.function.__module__ == "my_training"
    assert Run.from_config({**GOOD, "rewards": ["my_training:longer"]}).scored[0].name == "longer"
    monkeypatch.delitem(sys.modules, "my_training")


HYDRA_MAIN = """
import hydra
from rlmesh.rl.trainers.run import Run

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    run = Run.from_config(cfg)
    print("RUN", run.steps, run.actor.lr, run.algorithm.samples, run.scored[0].name)
    run.submit("hydra")

main()
"""


def test_a_hydra_main_works(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "main.py").write_text(HYDRA_MAIN)
    (tmp_path / "conf.yaml").write_text(
        f"defaults: [_self_, actor: small]\nmodel: {tmp_path}/none\ndata: [{{prompt: a}}]\nrewards: [exact]\n"
        "algorithm: {name: grpo, samples: 4}\nsteps: 5\n"
    )
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "small.yaml").write_text("lr: 1e-5\n")
    done = subprocess.run(
        [sys.executable, "main.py", "actor.lr=3e-5", "algorithm.samples=8"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "RUN 5 3e-05 8 exact" in done.stdout, done.stderr
    assert "there is no folder" in done.stderr and done.returncode == 1


# Faults.

MANY = {
    "model": "some/model",
    "data": "train.jsonl",
    "rewards": ["gsm9k", {"function": "exact", "wieght": 2}, "rlmesh.rl.rewards.gsm8k:compute_scor", "no_such:thing"],
    "algorithm": {"name": "grpo", "smaples": 4, "kl": "much", "correction": {"levl": "token"}},
    "actor": {"learning_rte": 1e-6, "lr": "high", "epochs": 0},
    "rollout": {"n": 0, "temperature": 0.0},
    "lr": 1.0,
    "num_generations": 8,
    "trian": "ddp",
    "batch_size": "16",
}


def test_all_faults_come_in_one_message_with_the_nearest_names() -> None:
    with pytest.raises(UsageError) as raised:
        Run.from_config(MANY, ["rollout.max_token=3", "actor.ranks=0", "seed"])
    text = str(raised.value)
    for said in (
        "settings are wrong, and nothing was started",
        "'seed' is no setting: write section.key=value",
        "rewards[0]: there is no reward 'gsm9k'; did you mean 'gsm8k'?",
        "there is no setting 'rewards[1].wieght'; did you mean rewards[1].weight?",
        "rlmesh.rl.rewards.gsm8k has no 'compute_scor'; did you mean 'compute_score'?",
        "there is no module 'no_such'",
        "there is no setting 'algorithm.smaples'; did you mean algorithm.samples?",
        "algorithm.kl='much' must be a number",
        "there is no setting 'algorithm.correction.levl'; did you mean algorithm.correction.level?",
        "'actor.learning_rte'; did you mean actor.lr? It corresponds to learning_rate in other libraries.",
        "actor.lr='high' must be a number",
        "actor.epochs=0 must be ≥ 1",
        "actor.ranks=0 must be ≥ 1",
        "'rollout.n'; did you mean algorithm.samples? It corresponds to rollout.n in other libraries.",
        "rollout.temperature=0.0 must be > 0",
        "there is no setting 'rollout.max_token'; did you mean rollout.max_tokens?",
        "there is no setting 'lr': it belongs to the section actor; did you mean actor.lr?",
        "did you mean algorithm.samples? It corresponds to num_generations in other libraries.",
        "there is no setting 'trian'; did you mean train?",
        "batch_size='16' must be a whole number",
    ):
        assert said in text, text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "tests.rl.test_config:Foresight"}, "Foresight needs future, which no role gives"),
        ({"algorithm": "rloo"}, "'rloo' is a variant of GRPO: write {name: grpo, advantage: rloo}"),
        ({"algorithm": "gpro"}, "there is no algorithm 'gpro'; did you mean 'grpo'?"),
        ({"algorithm": {"samples": 4}}, "algorithm.name is missing"),
        ({"algorithm": 3}, "algorithm=3 must be a name"),
        ({"algorithm": "tests.rl.run_job:is_a"}, "is no algorithm"),
        ({"algorithm": {"name": "grpo", "samples": 1}}, "algorithm: GRPO: samples=1"),
        ({"rewards": []}, "at least one reward"),
        ({"rewards": [3]}, "rewards[0]=3 must be a name"),
        ({"rewards": [{"weight": 1}]}, "rewards[0].function is missing"),
        ({"rewards": ["tests.rl.test_config:wants_too_much"]}, "has a parameter 'respons' without a default"),
        ({"steps": True}, "steps=True must be a whole number"),
        ({"actor": 3}, "actor=3 must be"),
        ({"model": None}, "model is missing"),
    ],
)  # fmt: skip
def test_each_fault_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Run.from_config({**GOOD, **changes})
    assert said in str(raised.value)


class Foresight(ReinforcePlusPlus):
    """An algorithm that needs what no role gives."""

    @property
    def needs(self) -> Any:
        return frozenset({"future"})


def wants_too_much(respons: str, ground_truth: str) -> float:
    return 0.0


def test_nothing_is_told_twice_and_nothing_right_is_told() -> None:
    run, faults = read_run({**GOOD, "algorithm": {"name": "grpo", "smaples": 4}})
    assert run is None and len(faults) == 1
    assert read_run(GOOD)[1] == []


def test_what_is_no_configuration_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    cases = {
        "list.json": ("[1]", "must hold an object"),
        "broken.json": ("{", "cannot be read as JSON"),
        "again.json": ('{"actor": {"lr": 1, "lr": 2}}', "cannot be read as JSON: the key 'lr' occurs twice"),
        "twice.yaml": ("steps: 1\nsteps: 2\n", "cannot be read as YAML"),
        "raises.py": ("x = 1\nnope\n", "raises.py:2: NameError"),
        "nothing.py": ("from tests.rl.run_job import is_a\n", "it defines no run; write run = Run(…)"),
        "json.py": ("run = 1\n", "a module 'json' exists already"),
        "run.toml": ("", "the suffix .yaml, .yml, .json, .py"),
    }
    for name, (text, said) in cases.items():
        if name.endswith("yaml"):
            pytest.importorskip("omegaconf")
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError) as raised:
            Run.from_config(tmp_path / name)
        assert said in str(raised.value)
    with pytest.raises(UsageError, match=r"did you mean .*twice\.yaml"):
        Run.from_config(tmp_path / "twise.yaml")
    with pytest.raises(UsageError, match="a configuration is a mapping"):
        Run.from_config(3)
    for name in ("raises", "nothing"):
        sys.modules.pop(name, None)


# Names.


def test_names_lead_to_what_they_say() -> None:
    assert find_algorithm("PPO") is PPO and find_algorithm("tests.rl.test_config:Mine") is Mine
    assert all(issubclass(find_algorithm(name), Algorithm) for name in ALGORITHMS)
    assert all(Reward(find_reward(name)).name == name for name in REWARDS)


@dataclass(frozen=True)
class Mine(Algorithm):
    """A user's algorithm."""


def test_each_variant_of_grpo_is_led_to_its_setting() -> None:
    from typing import get_args

    from rlmesh.rl.trainers.named import VARIANTS

    for name, setting in VARIANTS.items():
        key, value = setting.split(": ")
        assert value == name and value in get_args(Loss if key == "loss" else Advantage)
    missing = {*get_args(Loss), *get_args(Advantage)} - set(VARIANTS)
    assert missing == {"grpo", "reinforce++"}


def test_names_of_other_libraries_lead_to_settings_that_exist() -> None:
    sections = dict(keys_of(Run)) | {"algorithm": tuple(vars(GRPO()))}
    for name, ours in ELSEWHERE.items():
        section, _, key = ours.rpartition(".")
        assert key in sections[section], name
        assert name not in sections[""], f"{name} is a setting here"


@pytest.mark.parametrize(
    ("kind", "keywords", "suggested"),
    [
        (ActorSettings, {"learning_rte": 1e-6, "rank": 2}, r"ActorSettings\(rank=…\): .*did you mean ranks\?"),
        (ActorSettings, {"learning_rate": 1e-6}, r"did you mean actor\.lr\?"),
        (RolloutSettings, {"max_new_tokens": 5}, r"did you mean rollout\.max_tokens\?"),
        (GRPO, {"num_generations": 8}, r"GRPO\(num_generations=…\): .*did you mean algorithm\.samples\?"),
        (Mine, {"sampels": 8}, r"Mine\(sampels=…\): .*did you mean samples\?"),
        (Correction, {"uper": 2.0}, r"did you mean upper\?"),
        (partial(Reward, is_a), {"wieght": 2.0}, r"Reward\(wieght=…\): .*did you mean weight\?"),
        (Run, {"lr": 1e-6}, r"belongs to the section actor; did you mean actor\.lr\? There is critic\.lr too"),
        (partial(replace, ActorSettings()), {"max_grad_nrm": 1.0}, r"did you mean max_grad_norm\?"),
    ],
)
def test_a_wrong_keyword_in_python_is_answered_with_the_right_one(
    kind: Any, keywords: dict[str, Any], suggested: str
) -> None:
    with pytest.raises(TypeError, match=suggested):
        kind(**keywords)


class Handmade(Algorithm):
    """A user's algorithm that is no dataclass."""

    def __init__(self, temper: float, **others: int) -> None:
        object.__setattr__(self, "temper", temper)
        super().__init__(**others)


def test_an_algorithm_with_parameters_of_its_own_is_made_copied_and_pickled() -> None:
    made = Handmade(temper=0.5, samples=3)
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (vars(one)["temper"], one.samples) == (0.5, 3)


# The command.


def bad_config(folder: Path) -> Path:
    values = {**MANY, "model": str(folder / "nowhere"), "data": str(folder / "none.jsonl")}
    path = folder / "bad.json"
    path.write_text(json.dumps(values))
    return path


def test_train_tells_all_faults_at_once_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = bad_config(tmp_path)
    assert main(["train", str(path), "--set", "seed=-1"]) == 2
    text = capsys.readouterr().err
    assert "did you mean actor.lr" in text and "seed=-1 must be" in text
    assert "there is no folder" in text and "there is no data file" in text
    assert sorted(child.name for child in tmp_path.iterdir()) == ["bad.json"]


def test_faults_are_told_before_torch_is_loaded_and_quickly(tmp_path: Path) -> None:
    program = (
        "import sys; from rlmesh.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted(set(sys.modules) & {'torch', 'transformers', 'pyarrow'}))"
    )
    command = [sys.executable, "-c", program, "train", str(bad_config(tmp_path))]
    began = time.process_time(), _children_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    used_s = time.process_time() - began[0] + _children_s() - began[1]
    print(f"{used_s:.2f} s of CPU time")
    assert done.stdout.strip() == "2 []", done.stdout + done.stderr
    assert used_s < 3.0  # the time of the processor: that of the wall depends on what else runs


def _children_s() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a CONFIG"),
        (["--env", "CartPole-v1"], "--env: for agents in environments; name an algorithm by --run"),
        (["x.json", "--memory", "3"], "--memory is for --fit"),
    ],
)
def test_train_says_what_there_is(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err

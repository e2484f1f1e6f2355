"""What is imported before processes become workers: found by reading, never by importing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlmesh.job.entry_points.preload import find_preload
from rlmesh.job.entry_points.resolving import resolve_entry


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "preload_me"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    return folder


def preload(*entries: str) -> tuple[str, ...]:
    return find_preload([resolve_entry(entry) for entry in entries])


def test_heavy_imports_at_the_top_level(package: Path) -> None:
    (package / "actor.py").write_text(
        "import json, vllm, grpc, deepspeed, ray\n"
        "import torch.nn.functional as F\n"
        "from transformers import Qwen2ForCausalLM, AutoTokenizer as Tok\n"
        "from transformers.trainer import Trainer\n"
        "class Actor: ...\n"
    )
    assert preload("preload_me.actor.Actor") == (
        "torch",
        "transformers",
        "transformers:Qwen2ForCausalLM",
        "transformers:AutoTokenizer",
    )


def test_names_that_are_used_of_a_module(package: Path) -> None:
    (package / "actor.py").write_text(
        "import transformers as tf\nclass Actor:\n    def setup(self):\n        self.m = tf.Qwen2ForCausalLM()\n"
    )
    assert preload("preload_me.actor.Actor") == ("transformers", "transformers:Qwen2ForCausalLM")


def test_a_role_without_torch_preloads_none(package: Path) -> None:
    (package / "light.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "from rlmesh import RoleGroup, rpc, current_worker, BaseTrainer\n"
        "class Light:\n    def setup(self):\n        import torch\n"
    )
    assert preload("preload_me.light.Light") == ()


def test_local_imports_are_followed(package: Path) -> None:
    (package / "actor.py").write_text("from . import model\nfrom .losses import ppo\nclass Actor: ...\n")
    (package / "model.py").write_text("try:\n    import numpy\nexcept ImportError:\n    numpy = None\n")
    (package / "losses").mkdir()
    (package / "losses" / "__init__.py").write_text("from preload_me.losses.ppo import ppo\n")
    (package / "losses" / "ppo.py").write_text("import torch\nfrom preload_me import actor\ndef ppo(): ...\n")
    assert set(preload("preload_me.actor.Actor")) == {"numpy", "torch"}
    assert not {"preload_me.actor", "preload_me.model"} & set(sys.modules)


def test_rlmesh_itself_is_followed(package: Path) -> None:
    (package / "actor.py").write_text("from rlmesh.rl.losses import token_mean\nclass Actor: ...\n")
    assert "torch" in preload("preload_me.actor.Actor")


def test_names_that_are_imported_at_their_first_use_are_followed(package: Path) -> None:
    (package / "light.py").write_text("from rlmesh.rl import Sample, TrainingEngine\nclass Light: ...\n")
    (package / "actor.py").write_text("from rlmesh.rl import TransformersEngine\nclass Actor: ...\n")
    assert preload("preload_me.light.Light") == ()
    assert "torch" in preload("preload_me.actor.Actor")


def test_names_on_demand_that_lead_in_a_circle_end_the_scan(package: Path) -> None:
    lazy = "if TYPE_CHECKING:\n    from {} import {}\ndef __getattr__(name): ...\n"
    (package / "one").mkdir()
    (package / "one" / "__init__.py").write_text(lazy.format("preload_me.two", "Net"))
    (package / "two.py").write_text(lazy.format(".one", "Net") + "import numpy\n")
    (package / "actor.py").write_text("from rlmesh import errors\nfrom .one import Net\nclass Actor: ...\n")
    assert preload("preload_me.actor.Actor") == ("numpy",)


def test_scripts_and_what_cannot_be_read(package: Path) -> None:
    script = package / "train.py"
    script.write_text("import torch\n")
    (package / "broken.py").write_text("import torch\nclass (\n")
    assert preload(f"{script} --lr 1") == ("torch",)
    assert preload("preload_me.broken.Actor", "no_such_package.Actor", "no_such_script.py") == ()


def test_roles_that_hold_a_model_preload_what_models_are_made_of(package: Path) -> None:
    (package / "actor.py").write_text("from rlmesh.rl.roles.actor import ActorRole\nclass Actor(ActorRole): ...\n")
    for entry in ("preload_me.actor.Actor", "rlmesh.rl.roles.rollout.RolloutRole", "rlmesh.rl.roles.critic.CriticRole"):
        assert {"torch", "transformers.modeling_utils"} <= set(preload(entry)), entry
    envs = preload("rlmesh.envs.runners.env_runner.EnvRunner")
    assert "numpy" in envs and "transformers.modeling_utils" not in envs

"""The recipes of docs/slurm.md: what they submit can be rendered, and their scripts are shell."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlmesh.cli.commands import launch
from rlmesh_launcher.sbatch import BatchJob
from rlmesh_launcher.sbatch_options import SBATCH_OPTIONS, split_words

TEXT = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("rlmesh launch --slurm")]
SCRIPTS = [block for block in BLOCKS if block.startswith("#!")]


def launch_options() -> dict[str, bool]:
    parser = argparse.ArgumentParser()
    launch.add_options(parser)
    return {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}


def test_there_are_recipes() -> None:
    assert len(COMMANDS) >= 4
    assert len(SCRIPTS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_submitted_can_be_rendered(command: str) -> None:
    words = split_words(shlex.split(command)[3:], launch_options())
    script = BatchJob(words.sbatch, words.job, words.launch).script()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for name in words.sbatch:
        assert f"#SBATCH --{name}" in script


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_shell_with_known_options(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = re.findall(r"--([a-z-]+)", " ".join(re.findall(r"#SBATCH (.*)", script)))
    assert options
    assert set(options) <= set(SBATCH_OPTIONS)
    assert "srun rlmesh launch job.py" in script

"""The submitting program in its workers: one class, one identity; the same arguments, folders and flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlmesh.job.entry_points.program import Program, split_command, split_path, with_submitters
from tests.master.launched import ROOT, Launched

IDENTITY = """
import asyncio, json, sys
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

FACTOR = int(sys.argv[1])

class Algo(Enum):
    PPO = "ppo"
    GRPO = "grpo"

@dataclass
class Config:
    algo: Algo = Algo.GRPO

class Pair(NamedTuple):
    left: Algo
    right: int

class ScriptError(Exception):
    def __init__(self, algo, why):
        super().__init__(algo, why)
        self.algo = algo

def scaled(x): return FACTOR * x

class Worker:
    @rpc
    def config(self):
        config = current_worker().job_info.user_config
        return isinstance(config, Config) and config.algo is Algo.GRPO

    @rpc
    def check(self, config, pair, kind, apply, local):
        return [isinstance(config, Config), config.algo is Algo.PPO, type(pair) is Pair, pair.left is Algo.GRPO,
                kind is Algo, apply is scaled, apply(3), local(Algo.PPO)]

    @rpc
    def give(self): return Config(Algo.PPO), Pair(Algo.GRPO, 1), Algo, scaled, ScriptError(Algo.PPO, "given")

    @rpc
    def fail(self): raise ScriptError(Algo.PPO, "raised")

class Trainer:
    def run(self):
        seen, here = {}, Worker()
        worker, other = RoleGroup("WORKER"), RoleGroup("OTHER")
        def local(algo): return algo is Algo.PPO
        seen["trainer"] = ask(worker.call_rank0, local) + [here.config()]
        seen["through"] = checked(other.call_rank0("echo", other.call_rank0("echo", here.give()).result()).result())
        seen["raised"] = caught(worker.call_rank0("fail"))
        seen["config"] = worker.call_rank0("config").result()
        print("SEEN", json.dumps(seen))
        RoleGroup("OTHER").call_rank0("wait").result()

def ask(call, local):
    told = call("check", Config(Algo.PPO), Pair(Algo.GRPO, 1), Algo, scaled, local).result()
    return told + checked(call("give").result())

def checked(given):
    config, pair, kind, function, error = given
    return [isinstance(config, Config), config.algo is Algo.PPO, type(pair) is Pair, pair.left is Algo.GRPO,
            kind is Algo, function is scaled, type(error) is ScriptError and error.algo is Algo.PPO]

def caught(future):
    try:
        future.result()
    except ScriptError as error:
        return [error.algo is Algo.PPO]

def main():
    job = DLJobBuilder().config(Config()).role("WORKER").run(Worker).role("TRAINER").run(Trainer)
    job = job.role("OTHER").run("other.Other").build()
    async def drive():
        async with job.start("identity", view="plain") as handle:
            async with handle.join() as runtime:
                worker = RoleGroup("WORKER", runtime=runtime)
                def local(algo): return algo is Algo.PPO
                here = await worker.call_rank0("check", Config(Algo.PPO), Pair(Algo.GRPO, 1), Algo, scaled, local)
                here += checked(await worker.call_rank0("give"))
                try:
                    await worker.call_rank0("fail")
                except ScriptError as error:
                    here.append(error.algo is Algo.PPO)
                print("DRIVER", json.dumps(here))
                await RoleGroup("OTHER", runtime=runtime).call_rank0("go")
            await handle
    asyncio.run(drive())

if __name__ == "__main__":
    main()
"""

OTHER = """
import threading
from rlmesh import rpc

class Other:
    gate = threading.Event()
    @rpc
    def echo(self, value): return value
    @rpc(concurrent=2)
    def wait(self): return self.gate.wait(30)
    @rpc(concurrent=2)
    def go(self): self.gate.set()
"""


@pytest.mark.case("b15")
@pytest.mark.parametrize(
    "way", ["script", *(pytest.param(way, marks=pytest.mark.slow) for way in ("module", "launch", "launch module"))]
)
def test_classes_of_the_program_are_the_same_everywhere(tmp_path: Path, way: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "main.py").write_text(IDENTITY)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "pack" / "other.py").write_text(OTHER)
    launch = ["-m", "rlmesh.cli.main", "launch"]
    argv = {
        "script": ["pack/main.py"],
        "module": ["-m", "pack.main"],
        "launch": [*launch, "pack/main.py"],
        "launch module": [*launch, "-m", "pack.main"],
    }[way]
    with Launched([*argv, "7"], tmp_path) as job:
        assert job.ended() == 0, job.output
    checks = [True] * 6 + [21, True] + [True] * 7
    assert json.loads(job.wait_for(r"DRIVER (.*)").group(1)) == [*checks, True], job.output
    seen = json.loads(job.wait_for(r"SEEN (.*)").group(1))
    assert seen["config"] is True
    assert seen["trainer"] == [*checks, True]
    assert seen["through"] == [True] * 7, "a worker that has not imported the script gives back what it was given"
    assert seen["raised"] == [True]


OPTIONS = """
import argparse, json, os, sys, warnings
HERE = os.getcwd()
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int, default=1)
ARGS = parser.parse_args()
sys.argv = sys.argv[:1]
assert open("beside.txt").read() == "x"
sys.path.append(os.path.abspath("late"))
import late_module
from rlmesh import DLJobBuilder, RoleGroup, rpc

class Worker:
    @rpc
    def options(self):
        import late_module
        return [ARGS.n, HERE, os.getcwd(), sys.flags.optimize, "job_flag" in sys._xoptions, __debug__,
                ["error", "error::UserWarning"].count(sys.warnoptions[-1]) if sys.warnoptions else 0]

class Trainer:
    def run(self):
        print("SEEN", json.dumps(RoleGroup("WORKER").call_rank0("options").result()))

if __name__ == "__main__":
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    DLJobBuilder().role("WORKER").run(Worker).env(ENV).role("TRAINER").run(Trainer).build().submit("options")
"""


@pytest.mark.case("n04")
@pytest.mark.case("b06")
@pytest.mark.parametrize("way", ["launch", *(pytest.param(way, marks=pytest.mark.slow) for way in ("python", "exec"))])
def test_workers_import_as_the_submitter_did(tmp_path: Path, way: str) -> None:
    """Also where the script has gone to another folder, and changed its own arguments, before it submits."""
    env = {"MALLOC_ARENA_MAX": "2"} if way == "exec" else {}
    (tmp_path / "job.py").write_text(OPTIONS.replace("ENV", repr(env)))
    (tmp_path / "beside.txt").write_text("x")
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "late_module.py").touch()
    launch = ["-m", "rlmesh.cli.main", "launch", "--view", "plain"] if way == "launch" else []
    with Launched(["-O", "-X", "job_flag=1", "-Werror::UserWarning", *launch, "job.py", "--n", "7"], tmp_path) as job:
        assert job.ended() == 0, job.output
    seen = json.loads(job.wait_for(r"SEEN (.*)").group(1))
    assert seen == [7, str(tmp_path), str(tmp_path / "elsewhere"), 1, True, False, 1]


@pytest.mark.case("b06")
@pytest.mark.parametrize("launch", [pytest.param(False, marks=pytest.mark.slow), True], ids=["python", "launch"])
def test_a_script_goes_to_another_folder_before_it_submits(tmp_path: Path, launch: bool) -> None:
    """Nothing else is special about it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job.py").write_text(
        "import os\nfrom rlmesh import DLJobBuilder\n"
        "class Trainer:\n    def run(self): print('runs')\n"
        "if __name__ == '__main__':\n    os.chdir('elsewhere')\n"
        "    DLJobBuilder().role('TRAINER').run(Trainer).build().submit('moved', view='plain')\n"
    )
    with Launched([*(("-m", "rlmesh.cli.main", "launch") if launch else ()), "job.py"], tmp_path) as job:
        assert job.ended() == 0, job.output
    assert "TRAINER:0 | runs" in job.output


PACKAGE = {
    "__init__.py": "",
    "helper.py": "VALUE = 42\n",
    "roles.py": "from .helper import VALUE\nclass T:\n    def run(self): print('value', VALUE)\n",
    "main.py": "from rlmesh import DLJobBuilder\nfrom mypkg.helper import VALUE\n"
    "class T:\n    def run(self): print('value', VALUE)\n",
    "rel.py": "from rlmesh import DLJobBuilder\nfrom .helper import VALUE\n"
    "class T:\n    def run(self): print('value', VALUE)\n",
    "viaroles.py": "from rlmesh import DLJobBuilder\nfrom .roles import T\n",
    "__main__.py": "from rlmesh import DLJobBuilder\nfrom .helper import VALUE\n"
    "class T:\n    def run(self): print('value', VALUE)\n",
    "types.py": "raise ImportError('a file of the package took the place of a module of the standard library')\n",
}
SUBMIT = "if __name__ == '__main__':\n    DLJobBuilder().role('TRAINER').run(T).build().submit('pkg', view='plain')\n"


@pytest.mark.case("n08")
@pytest.mark.parametrize(
    ("name", "launch"),
    [
        # Each module one way and each way with two modules; the others are slow.
        pytest.param(name, launch, marks=[pytest.mark.slow] * (launch == (place % 2 == 0)), id=f"{name}-{way}")
        for place, name in enumerate(["mypkg.main", "mypkg.rel", "mypkg.viaroles", "mypkg"])
        for launch, way in enumerate(["python", "launch"])
    ],
)
def test_modules_are_programs(tmp_path: Path, name: str, launch: int) -> None:
    (tmp_path / "mypkg").mkdir()
    for file, text in PACKAGE.items():
        submits = file in ("main.py", "rel.py", "viaroles.py", "__main__.py")
        (tmp_path / "mypkg" / file).write_text(text + SUBMIT * submits)
    with Launched([*(("-m", "rlmesh.cli.main", "launch") if launch else ()), "-m", name], tmp_path) as job:
        assert job.ended() == 0, job.output
    assert "TRAINER:0 | value 42" in job.output


def test_the_interpreters_flags_are_told_from_the_programs_arguments() -> None:
    def split(line: str) -> Any:
        return split_command(line.split())

    assert split("job.py --n 7 -O") == ((), ("--n", "7", "-O"))
    assert split("-O -X dev -Werror -u job.py -m x") == (("-O", "-X", "dev", "-W", "error"), ("-m", "x"))
    assert split("-uOO -bWignore::A -m mypkg.main --n 7") == (("-O", "-O", "-b", "-W", "ignore::A"), ("--n", "7"))
    assert split("-mmypkg.main --n 7") == ((), ("--n", "7"))
    assert split("-I -c code a") == ((), ("a",))
    assert split("--check-hash-based-pycs never job.py a") == ((), ("a",))
    assert split("-i") == ((), None)


def test_the_submitters_folders_keep_their_places_in_the_path() -> None:
    own = ["/env", "/python/lib", "/python/site-packages"]
    first, last = split_path(["/job", "/env", "/python/lib", "/python/site-packages", "/late"], own[1:])
    assert (first, last) == (("/job", "/env"), ("/late",))
    program = Program(first=first, last=last)
    assert with_submitters(own, program, ("/root",)) == ["/root", "/job", *own, "/late"]
    assert with_submitters(own, program, ("/job",)) == ["/job", *own, "/late"]


@pytest.mark.case("n09")
def test_beside_a_clone_that_is_named_as_the_package(tmp_path: Path) -> None:
    """An editable installation puts plain folders on ``sys.path``: an import hook would come after the search that
    takes the clone, in the folder of the script, for a namespace package."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "dev-mode-exact" not in build
    (tmp_path / "rlmesh").symlink_to(ROOT)
    (tmp_path / "job.py").write_text("import rlmesh_launcher; from rlmesh import DLJobBuilder; print('found')")
    folders = [str(tmp_path / "rlmesh" / folder) for folder in build["dev-mode-dirs"]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("found\n", 0), done.stderr

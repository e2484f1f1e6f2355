"""How workers come to life: forked from the right zygote, or started by exec."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from rlmesh.agent.processes.spawner import AT_IMPORT, AT_START, import_time_changes
from rlmesh.agent.protocol import WorkerSpec, named_error, portable_error
from rlmesh.agent.worker.worker_process import reseed
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.entry_points.preload import needs_preload
from tests.agent.nodes import Node, open_node
from tests.agent.roles import OwnError

LIBRARY = """
import os
if gate := os.environ.get("GATE"):
    open(gate).read()  # as slow as the test likes
IMPORTED_BY = os.getpid()
THREADS = os.environ.get("OMP_NUM_THREADS")
class Model: ...
"""

ROLE = """
import os, slowlib
from rlmesh import rpc
class Heavy:
    @rpc
    def facts(self):
        return slowlib.IMPORTED_BY, os.getpid(), slowlib.THREADS, os.environ.get("OMP_NUM_THREADS")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a library that is slow to import, and a role that uses it."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "slowlib.py").write_text(LIBRARY)
    (folder / "threadlib.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(99,),"
                                         " daemon=True, name='pool').start()\n")  # fmt: skip
    (folder / "heavyrole.py").write_text(ROLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return str(folder)


def heavy(node: Node, name: str, library: str, **env: str) -> WorkerSpec:
    entry = EntryPoint("class", "heavyrole", "Heavy")
    return node.spec(entry, name, import_roots=(library,), env=env)


async def test_who_needs_the_preload_waits_for_it_and_nobody_else(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("GATE", str(gate))
    preload = ("no_such_library", "slowlib:Model", "slowlib:Missing")
    async with open_node(tmp_path, preload=preload) as node:
        task = asyncio.create_task(node.spawn(heavy(node, "SLOW:0", library), node.spec("Echo", "QUICK:0")))
        await node.bound("QUICK:0")
        await node.master.heard("ready", "QUICK:0")
        assert not task.done()
        await asyncio.to_thread(gate.write_text, "go on")
        pids = await task
        facts = await node.member(await node.bound("SLOW:0")).call("facts")
        assert facts[0] not in (facts[1], os.getpid())  # imported once, by the zygote
        assert pids[0] == facts[1]
        log = node.agent_log()
        assert "SLOW:0.0 is pid" in log and "(preloaded," in log and "(bare," in log
        assert "could not import no_such_library: ModuleNotFoundError" in log
        assert "could not import slowlib:Missing: AttributeError" in log


async def test_an_environment_that_libraries_read_at_import_is_honoured(tmp_path: Path, library: str) -> None:
    async with open_node(tmp_path, preload=("slowlib",), env={"OMP_NUM_THREADS": "1"}) as node:
        same = heavy(node, "SAME:0", library, OMP_NUM_THREADS="1", RANK="0", TORCHELASTIC_RUN_ID="x")
        threads = heavy(node, "THREADS:0", library, OMP_NUM_THREADS="3")
        hashed = heavy(node, "HASHED:0", library, PYTHONHASHSEED="7")
        await node.spawn(same, threads, hashed)
        facts = {}
        for name in ("SAME:0", "THREADS:0", "HASHED:0"):
            hello = await node.bound(name)
            await node.master.heard("ready", name)
            facts[name] = await node.member(hello).call("facts")
        assert facts["SAME:0"][0] != facts["SAME:0"][1]
        assert facts["SAME:0"][2:] == ("1", "1")
        assert facts["THREADS:0"][0] == facts["THREADS:0"][1]
        assert facts["THREADS:0"][2:] == ("3", "3")
        log = node.agent_log()
        assert "THREADS:0 imports for itself: OMP_NUM_THREADS differ" in log
        assert "HASHED:0 starts by exec: PYTHONHASHSEED differ" in log
        assert all(way in log for way in ("(preloaded,", "(bare,", "(exec,"))


async def test_a_zygote_with_a_second_thread_refuses(tmp_path: Path, library: str) -> None:
    async with open_node(tmp_path, preload=("threadlib", "slowlib")) as node:
        await node.spawn(heavy(node, "A:0", library))
        await node.bound("A:0")
        log = node.agent_log()
        assert "the preloaded zygote cannot fork: it has 2 threads (" in log
        assert "(bare," in log


async def test_without_zygotes_members_start_all_the_same(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.start("Echo", "A:0")
        log = node.agent_log()
        pid = int(log.partition("the bare zygote (pid ")[2].partition(")")[0])
        os.kill(pid, signal.SIGKILL)
        member = await node.start("Echo", "B:0")
        assert await member.call("echo", 1) == 1
        assert "the zygote process ended; workers start without it" in node.agent_log()
        assert "(exec," in node.agent_log()
        first, second = [
            await node.member((await node.master.heard("bound", name))[2]).call("facts") for name in ("A:0", "B:0")
        ]
        for key in ("session", "input"):
            assert (first[key] == first["pid"]) == (second[key] == second["pid"])
        assert first["random"] != second["random"]


def test_generators_depend_on_who_asks() -> None:
    import random

    spec = WorkerSpec("id", "job", "", "A", 0, 1, 0, 0, 1, 0, "", EntryPoint("class"), "", "", "", "", "simple")
    draws = []
    state = random.getstate()
    try:
        for rank, incarnation in ((0, 0), (1, 0), (0, 1), (0, 0)):
            reseed(replace(spec, rank=rank, incarnation=incarnation))
            draws.append(random.random())
    finally:
        random.setstate(state)
    assert draws[0] == draws[3]
    assert len(set(draws)) == 3


def test_which_variables_are_read_when() -> None:
    base = {"OMP_NUM_THREADS": "1", "HOME": "/root", "LANG": "C"}
    wanted = {
        "OMP_NUM_THREADS": "2", "HOME": "/root", "LANGCHAIN_KEY": "x", "CUDA_VISIBLE_DEVICES": "1", "RANK": "0",
        "TORCHELASTIC_RUN_ID": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "HF_HOME": "/models", "LD_PRELOAD": "x",
        "LC_ALL": "C", "MASTER_PORT": "1", "CUDA_LAUNCH_BLOCKING": "1",
    }  # fmt: skip
    assert import_time_changes(base, wanted, AT_IMPORT) == {"OMP_NUM_THREADS", "HF_HOME", "CUDA_LAUNCH_BLOCKING"}
    assert import_time_changes(base, wanted, AT_START) == {"LD_PRELOAD", "LC_ALL"}


SOURCES = {
    "light.py": "import json, os\nfrom rlmesh import rpc\nfrom typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    import torch\n",
    "direct.py": "import torch.nn as nn\n",
    "through.py": "from pkg import part\n",
    "pkg/__init__.py": "",
    "pkg/part.py": "from .deep import thing\n",
    "pkg/deep.py": "from transformers import AutoModel\n",
    "numbers_only.py": "import numpy\n",
    "unread.py": "import some_installed_package\n",
    "losses.py": "from rlmesh.rl.losses import ppo_loss\n",
    "engine.py": "from rlmesh.rl import TransformersEngine\n",
    "values.py": "from rlmesh.rl import Sample\n",
    "broken.py": "import (\n",
    "inside.py": "class Role:\n    def setup(self):\n        import torch\n",
    "tracked.py": "class Role:\n    def run(self):\n        import some_installed_package\n",
    "main.py": "import light\nif __name__ == '__main__':\n    import torch\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "needed"),
    [("light", False), ("direct", True), ("through", True), ("numbers_only", False), ("unread", True),
     ("broken", False), ("nowhere", True), ("losses", True), ("engine", True),
     ("values", False), ("__main__", False), ("script", False),
     ("inside", True), ("tracked", False)],
)  # fmt: skip
def test_a_role_that_imports_something_of_the_list_needs_it(tmp_path: Path, module: str, needed: bool) -> None:
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
    entry = EntryPoint("class", module, "Role")
    if module == "script":
        entry = EntryPoint("script", script=str(tmp_path / "light.py"))
    preload = ("torch", "transformers:AutoModel", "numpy")
    assert needs_preload(entry, str(tmp_path / "main.py"), (str(tmp_path),), preload) is needed
    assert not needs_preload(entry, str(tmp_path / "main.py"), (str(tmp_path),), ())


def test_errors_travel_under_their_own_name() -> None:
    import pickle

    sent = pickle.loads(pickle.dumps(portable_error(OwnError("no model"))))
    assert (type(sent).__name__, str(sent)) == ("OwnError", "no model")
    assert isinstance(portable_error(ValueError("x")), ValueError)
    again = pickle.loads(pickle.dumps(named_error("A", "b")))
    assert (type(again).__name__, str(again)) == ("A", "b")


@pytest.mark.slow
async def test_torch_and_transformers_are_imported_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    role = tmp_path / "torchrole.py"
    role.write_text(
        "import os, sys, torch\nfrom transformers import Qwen2ForCausalLM\nfrom rlmesh import rpc\n"
        "class Role:\n"
        "    @rpc\n"
        "    def facts(self):\n"
        "        import numpy\n"
        "        return (len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(),\n"
        "                torch.rand(1).item(), numpy.random.rand(), torch.get_num_threads())\n"
    )
    async with open_node(tmp_path, preload=("torch", "transformers:Qwen2ForCausalLM")) as node:
        entry = EntryPoint("class", "torchrole", "Role")
        members = [await node.start(entry, f"A:{rank}", import_roots=(str(tmp_path),)) for rank in range(2)]
        one, two = [await member.call("facts") for member in members]
        assert one[1] is False and one[2] != two[2] and one[3] != two[3] and one[4] == 1
        assert node.agent_log().count("(preloaded,") == 2
        print(node.agent_log(), file=sys.stderr)

"""A user without any right of its own, made for tests, who runs jobs on a cluster whose daemons belong to root.

The user must be able to read what it runs: the checkout and the packages that rlmesh needs are copied to where anybody
can read them, since a checkout or an environment in root's home is nobody else's.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import ROOT, SlurmCluster

NEEDED = ("cloudpickle", "msgpack", "pydantic", "pyzmq", "rich", "uvloop")
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = (sys.executable, f"/usr/bin/python{_VERSION}", f"/usr/local/bin/python{_VERSION}")


def why_not() -> str:
    """Why there can be no such user here; empty if there can."""
    if os.getuid() != 0:
        return "another user is made by root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in ("useradd", "userdel") if shutil.which(name, path=path) is None]
    return f"there is no {', '.join(absent)}" if absent else ""


@dataclass(frozen=True)
class PlainUser:
    """Its ``folder`` is its own, ``root`` is the copy of the checkout."""

    uid: int
    gid: int
    folder: Path
    root: Path
    python: str
    cluster: SlurmCluster

    def env(self) -> dict[str, str]:
        env = {name: value for name, value in self.cluster.env.items() if not name.startswith(("XDG_", "RLMESH_KEY"))}
        paths = (self.root, self.root / "launcher", self.root / "packages")
        return env | {
            "HOME": str(self.folder), "USER": pwd.getpwuid(self.uid).pw_name,
            "PYTHONPATH": ":".join(map(str, paths)), "XDG_RUNTIME_DIR": str(self.folder / "run"),
        }  # fmt: skip

    def run(self, *command: str, check: bool = True) -> str:
        """As this user, in its folder; both streams."""
        done = subprocess.run(
            command, user=self.uid, group=self.gid, extra_groups=[], env=self.env(), cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60.0,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}"
        return done.stdout

    def launch(self, *words: str) -> str:
        """``rlmesh launch --slurm`` with these words; the number of the job."""
        said = self.run(self.python, "-m", "rlmesh.cli.main", "launch", "--slurm", *words)
        found = re.match(r"Slurm job (\d+)\n", said)
        assert found, said
        return found[1]

    def script(self, name: str) -> str:
        return str(self.root / "tests" / name)


@contextmanager
def plain_user(base: Path, cluster: SlurmCluster) -> Iterator[PlainUser | str]:
    """The user, gone at the end with all that it has; or why it cannot run rlmesh here.

    Args:
        base: a folder that everybody can enter.
    """
    name = f"rlm{secrets.token_hex(3)}"
    sbin = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    root, folder = base / "code", base / "home"
    _copy_code(root)
    subprocess.run(["useradd", "--no-create-home", "--home-dir", folder, name], env=sbin, check=True)
    try:
        about = pwd.getpwnam(name)
        for each in (folder, folder / "run"):
            each.mkdir(mode=0o700)
            os.chown(each, about.pw_uid, about.pw_gid)
        made = PlainUser(about.pw_uid, about.pw_gid, folder, root, "", cluster)
        python, why = _python_of(made)
        yield why if not python else PlainUser(about.pw_uid, about.pw_gid, folder, root, python, cluster)
    finally:
        subprocess.run(["userdel", name], env=sbin, check=True, capture_output=True)


def _copy_code(root: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("rlmesh", "launcher"):
        shutil.copytree(ROOT / part, root / part, ignore=ignored)
    for part in ("tests/master", "tests/launcher"):
        (root / part).mkdir(parents=True)
        for script in (ROOT / part).glob("*_job.py"):
            shutil.copy(script, root / part)
    packages = root / "packages"
    for distribution in _closure(NEEDED):
        for file in importlib.metadata.files(distribution) or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, packages / file)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _closure(names: tuple[str, ...]) -> list[str]:
    """Distributions and all that they need, without extras."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        found[name] = None
        waiting += [re.split(r"[^\w.-]", need)[0].lower() for need in needs if "extra ==" not in need]
    return list(found)


def _python_of(user: PlainUser) -> tuple[str, str]:
    """An interpreter of this version that the user can run, and what was wrong with those that it cannot."""
    tried = []
    for python in dict.fromkeys(PYTHONS):
        try:
            said = user.run(python, "-c", "import rlmesh.cli.main, zmq, msgpack, uvloop, pydantic; print('fit')")
        except (AssertionError, OSError) as error:
            tried.append(f"{python}: {str(error).strip().splitlines()[-1]}")
        else:
            if said.strip().endswith("fit"):
                return python, ""
    return "", f"no Python {_VERSION} that another user can run: {'; '.join(tried)}"

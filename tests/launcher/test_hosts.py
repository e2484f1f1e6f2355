"""hosts.toml, and the commands that are made of it; nothing is run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh.cli.commands.launch import add_options
from rlmesh.cli.launching.hosts import NOT_WITH_HOSTS, PASSED_ON, passed_on
from rlmesh.cli.launching.torchrun_options import IGNORED, REFUSED
from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh_launcher.hosts import RemoteHost, parse_hosts
from rlmesh_launcher.ssh import render
from tests.own_time import HANG_S

GOLDEN = Path(__file__).with_name("golden")

HOSTS = """\
python = "/opt/venv/bin/python"
directory = "/shared/my project"
ssh_options = ["-p", "2222"]

[[host]]
name = "gpu1"
address = "fd00::1"

[[host]]
name = "gpu2"
user = "me"
ssh_options = []
env = { HF_HOME = "/scratch/it's here", NCCL_DEBUG = "INFO" }
"""


def test_what_holds_for_all_and_what_for_one() -> None:
    first, second = parse_hosts(HOSTS, "hosts.toml")
    assert first == RemoteHost("gpu1", "fd00::1", "", "/opt/venv/bin/python", "/shared/my project", ("-p", "2222"))
    assert (second.user, second.ssh_options, second.env["NCCL_DEBUG"]) == ("me", (), "INFO")


def test_hosts_start_where_the_submitter_is() -> None:
    assert parse_hosts('[[host]]\nname = "a"', "x", "/here")[0].directory == "/here"


@pytest.mark.parametrize(("text", "says"), [
    ("", "names no hosts"),
    ("host = 3", "names no hosts"),
    ("[[host]]\n", "host 0 has no name"),
    ('[[host]]\nname = "-oProxyCommand=x"', "no name that ssh could connect to"),
    ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "names a more than once"),
    ('[[host]]\nname = "a"\npyton = "x"', "there is no key 'pyton'"),
    ('[[host]]\nname = "a"\nssh_options = "-p 1"', "ssh_options is a list of text"),
    ('[[host]]\nname = "a"\nenv = "A=1"', "env is a table of text"),
    ('[[host]]\nname = "a"\nenv = { B = "x", A = 1 }', 'env is a table of text, such as { NAME = "value" }; A is none'),
    ('[[host]]\nname = "a"\nenv = { A = "x\\u0000y" }', "A is none"),
    ('[[host]]\nname = "a"\nenv = { "A;B" = "x" }', "env names a variable 'A;B'"),
    ('[[host]]\nname = "a"\nenv = { "É" = "x" }', "env names a variable 'É'"),
    ('[[host]]\nname = 3', "name is text, not 3"),
    ("[[host\n", "is not TOML"),
])  # fmt: skip
def test_what_is_wrong_is_told(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_hosts(text, "hosts.toml")


def test_commands_are_as_they_were(request: pytest.FixtureRequest) -> None:
    commands = render(
        parse_hosts(HOSTS, "x"), "fd00::1", ["--view", "plain"], ["examples/job.py", "--", "--name", "a b"]
    )
    text = "\n".join(map(str, commands)) + "\n"
    assert text == (GOLDEN / "ssh.txt").read_text()
    assert "[fd00::1]:7" in commands[1].at("[fd00::1]:7")[-1]
    assert "--rdzv-endpoint '[fd00::1]:7' --view" in commands[1].at("[fd00::1]:7")[-1]


def test_the_endpoint_goes_to_its_place_only() -> None:
    """A folder whose name ends like the placeholder keeps it."""
    text = 'directory = "/HF_ENDPOINT"\n[[host]]\nname = "a"\n[[host]]\nname = "b"\n'
    _, other = render(parse_hosts(text, "x", "/p"), "10.0.0.1", [], ["job.py"])
    remote = other.at("10.0.0.1:4711")[-1]
    assert remote.startswith("cd /HF_ENDPOINT && ")
    assert remote.endswith("--rdzv-endpoint 10.0.0.1:4711")


ODD = {
    "QUOTES": 'it\'s "so" `id` $HOME ${HOME} $(id)',
    "LINES": "-----BEGIN KEY-----\nabc\n\n-----END KEY-----\n",
    "SPACES": "  a  b\t\r ",
    "BACKSLASHES": "\\n \\ \\\\ %s !x #y * ? [a] ~",
    "NOT_ASCII": "Á é ü ā Ɓ 漢字 🙂",
    "EMPTY": "",
    "n": "a name that a shell's script might have",
}


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_values_go_through_standard_input_as_they_are(shell: str, locale: str) -> None:
    """Through the shell that the command names. It leaves the next line to the command."""
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    host = RemoteHost("a", env=ODD, directory="/", python=sys.executable)
    (command,) = render([host], "a", [], [])
    assert not any(value in str(command) for value in ODD.values() if value)
    remote = command.argv[-1].replace("exec sh -c", f"exec {shell} -c")
    show = "import json, os; print(json.dumps([{k: os.environ.get(k) for k in %r}, input()]))" % sorted(ODD)  # noqa: UP031
    words, _, _ = remote.partition(" -u -m ")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} -c {shlex.quote(show)}"], input=command.variables + b"the key\nmore\n",
        capture_output=True, env={"LC_ALL": locale, "PATH": os.environ["PATH"]}, timeout=HANG_S, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [ODD, "the key"]


def test_a_tilde_is_the_home_of_the_host() -> None:
    text = 'directory = "~/my project"\npython = "~/venv/bin/python"\n[[host]]\nname = "a"\n[[host]]\nname = "b"\n'
    first, _ = render(parse_hosts(text, "x"), "a", [], ["job.py"])
    assert first.argv[-1].startswith("cd ~/'my project' && exec ~/venv/bin/python -u -m rlmesh.cli.main")
    home = parse_hosts(text.replace("~/my project", "~"), "x")
    assert render(home, "a", [], ["job.py"])[0].argv[-1].startswith("cd ~ && ")


def test_a_dry_run_prints_them_and_needs_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    assert main(["launch", "--hosts", str(tmp_path / "hosts.toml"), "--dry-run", "job.py", "x"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ssh -T ") == 2
    assert "--key-stdin" in printed
    assert "job.py -- x" in printed
    assert "# gpu2 gets these variables on standard input: HF_HOME, NCCL_DEBUG" in printed
    assert "it's here" not in printed


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    words = ["launch", "--hosts", str(tmp_path / "hosts.toml"), "--nnodes", "2", "--rdzv-endpoint", "a:1", "job.py"]
    assert main(words) == 2
    assert "leave out --nnodes, --rdzv-endpoint" in capsys.readouterr().err


HERE_ONLY = {"help", "job", "hosts", "dry_run", "key_file", "key_stdin", "slurm", "sbatch"}
"""Options of launch that mean something to the command that starts the hosts."""
NO_MEANING = {"rdzv_backend", "rdzv_id", "run_path", *(name.replace("-", "_") for name in (*IGNORED, *REFUSED))}


def test_each_option_of_launch_reaches_the_hosts_or_is_refused_or_means_nothing_there(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    known = {action.dest for action in parser._actions}
    assert known == {*PASSED_ON, *NOT_WITH_HOSTS} | HERE_ONLY | NO_MEANING
    seen = "--chaos A@start --chaos B@shutdown --metrics 127.0.0.1:0 --tracker wandb --timeline"
    words = f"{seen} -m --grace 0 --max-restarts 0 job"
    handed = f"--max-restarts 0 --grace 0.0 {seen} --module"
    assert " ".join(passed_on(parser.parse_args(words.split()))) == handed

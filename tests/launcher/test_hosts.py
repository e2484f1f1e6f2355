"""hosts.toml, and the commands that are made of it; nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh_launcher.hosts import Host, parse_hosts
from rlmesh_launcher.ssh import ENDPOINT, render

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
    assert first == Host("gpu1", "fd00::1", "", "/opt/venv/bin/python", "/shared/my project", ("-p", "2222"))
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
    ('[[host]]\nname = "a"\nenv = { A = 1 }', "env is a table of text"),
    ('[[host]]\nname = 3', "name is text, not 3"),
    ("[[host\n", "is no TOML"),
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
    assert not any(ENDPOINT in word for word in commands[1].at("[fd00::1]:7"))


def test_a_dry_run_prints_them_and_needs_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    assert main(["launch", "--hosts", str(tmp_path / "hosts.toml"), "--dry-run", "job.py", "x"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ssh -T ") == 2
    assert "--key-stdin" in printed
    assert "job.py -- x" in printed


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    words = ["launch", "--hosts", str(tmp_path / "hosts.toml"), "--nnodes", "2", "--rdzv-endpoint", "a:1", "job.py"]
    assert main(words) == 2
    assert "leave out --nnodes, --rdzv-endpoint" in capsys.readouterr().err

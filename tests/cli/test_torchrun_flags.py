"""torchrun's options and environment: what each means, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmesh.cli.launching.torchrun_options import IGNORED, REFUSED, NodeFlags, read_node_flags
from rlmesh.cli.main import build_parser
from rlmesh.errors import UsageError


def read(*words: str, **env: str) -> NodeFlags:
    return read_node_flags(build_parser().parse_args(["launch", *words, "job.py"]), env)


def test_without_options_it_is_one_node() -> None:
    assert read() == NodeFlags()
    assert read("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", "x:1") == NodeFlags()


def test_nodes_and_head_are_read_from_the_endpoint() -> None:
    flags = read("--nnodes", "3", "--node-rank", "2", "--rdzv-endpoint", "node0:1234")
    assert (flags.least, flags.most, flags.node_rank, flags.host, flags.port) == (3, 3, 2, "node0", 1234)
    assert read("--nnodes=2", "--rdzv_endpoint=[fd00::1]:7").host == "fd00::1"
    assert read("--nnodes=2", "--rdzv-endpoint=node0").port == 29400
    assert read("--nnodes=2", "--rdzv-endpoint=node0").node_rank is None
    assert read("--nnodes=2:4", "--rdzv-endpoint=node0").least == 2


def test_nodes_and_head_are_read_from_the_master_address() -> None:
    flags = read("--nnodes=2", "--master-addr=10.0.0.1", "--master_port=77", "--node_rank=1")
    assert (flags.host, flags.port, flags.node_rank) == ("10.0.0.1", 77, 1)
    assert read("--nnodes=2", "--master-addr=10.0.0.1").port == 29500


def test_environment_counts_where_an_option_is_missing() -> None:
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a:1", "PET_NPROC_PER_NODE": "4"}
    flags = read("--node-rank", "0", **env)
    assert (flags.most, flags.node_rank, flags.host, flags.slots) == (2, 0, "a", 4)
    assert read("--standalone", **env).most == 1
    assert read("-m", **env).module
    assert read(PET_MODULE="1").module


def test_settings_of_the_rendezvous_are_read_and_unknown_ones_told() -> None:
    conf = "join_timeout=60,last_call_timeout=5,is_host=1,colour=red"
    flags = read("--nnodes=2", "--rdzv-endpoint=a", "--rdzv-conf", conf)
    assert (flags.join_s, flags.last_call_s, flags.node_rank) == (60.0, 5.0, 0)
    assert flags.notes == ("--rdzv-conf colour changes nothing: rlmesh has no such setting",)


def test_folder_and_slots_are_read() -> None:
    assert read("--log-dir", "/l").log_root == Path("/l")
    assert read("--nproc-per-node", "auto").slots is None
    assert read("--nproc-per-node", "8").slots == 8


def test_restarts_and_grace_are_read() -> None:
    assert read().max_restarts is None
    assert read("--max-restarts=3").max_restarts == 3
    assert read(PET_MAX_RESTARTS="0").max_restarts == 0
    assert read("--shutdown-timeout", "7.5").grace_s == 7.5
    assert read("--max_restarts", "3", "--shutdown_timeout=1").notes == ()


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_changes_nothing_is_said(name: str) -> None:
    (note,) = read(f"--{name}", "3").notes
    assert f"--{name} changes nothing: " in note
    assert read(**{f"PET_{name.replace('-', '_').upper()}": "3"}).notes == (note,)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_mean_something_else_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name} has no meaning here: "):
        read(f"--{name}")


@pytest.mark.case("s07")
@pytest.mark.parametrize(("words", "says"), [
    (["--nnodes", "0"], "whole number of at least 1"),
    (["--nnodes", "two"], "--nnodes two"),
    (["--nnodes", "3:2"], "smaller than the first"),
    (["--nnodes", "2"], "pass --rdzv-endpoint"),
    (["--nnodes", "2", "--rdzv-endpoint", "a:b"], "is no host and port"),
    (["--nnodes", "2", "--rdzv-endpoint", "a", "--node-rank", "2"], "ranks are 0 to 1"),
    (["--node-rank", "1", "--rdzv-endpoint", "a"], "--node-rank 1 needs --nnodes N"),
    (["--nnodes", "2", "--rdzv-endpoint", "a", "--rdzv-backend", "etcd-v2"], "without etcd"),
    (["--rdzv-backend", "etcd"], "--rdzv-backend etcd: nodes come together at node 0 itself"),
    (["--nnodes=1", "--rdzv-backend=zeus"], "--rdzv-backend zeus"),
    (["--nnodes=2:20:30"], "--nnodes 2:20:30: give a whole number of at least 1, or two of them as MIN:MAX"),
    (["--nnodes=2:"], "--nnodes 2:: give"),
    (["--nnodes", "2", "--rdzv-endpoint", "a", "--rdzv-conf", "timeout=soon"], "timeout=soon"),
    (["--nnodes", "2", "--standalone"], "--standalone is one node"),
    (["--nproc-per-node", "0"], "--nproc-per-node 0"),
    (["--max-restarts", "-1"], "--max-restarts -1"),
    (["--shutdown-timeout", "long"], "--shutdown-timeout long: give a number of seconds"),
])  # fmt: skip
def test_wrong_options_are_told(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        read(*words)


def test_every_option_of_torchrun_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    ours = {name for action in build_parser()._subparsers._group_actions[0].choices["launch"]._actions  # type: ignore[union-attr,index]
            for name in action.option_strings}  # fmt: skip
    theirs = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    assert theirs <= ours

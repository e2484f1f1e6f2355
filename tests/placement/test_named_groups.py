"""Groups within a role, called by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh import RLRoleType, RoleGroup, rpc
from rlmesh.errors import RoleNotFound
from rlmesh.testing import InProcessCluster, LocalCluster
from tests.placement import groups_job


class Rollout:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @rpc
    def which(self) -> int:
        return self.rank


def test_a_group_is_a_role_of_fewer_members() -> None:
    with InProcessCluster() as cluster:
        cluster.serve("ROLLOUT", *map(Rollout, range(5)), groups={"prefill": 2, "decode": 3}, axes={"dp": 5})
        decode = RoleGroup[Rollout]("ROLLOUT/decode")
        assert decode.ranks == (2, 3, 4) and len(decode) == 3
        assert decode.call(Rollout.which).result() == [2, 3, 4]
        assert decode[0].call(Rollout.which).result() == 2, "indexes are those of the group"
        assert decode.call_rank0("which").result() == 2
        assert decode[1:].options(timeout_s=5).call("which").result() == [3, 4]
        assert decode.options(timeout_s=5).call("which").result() == [2, 3, 4]
        assert decode.along("dp").ranks == (2, 3, 4)
        assert RoleGroup(Rollout, group="prefill").call(Rollout.which).result() == [0, 1]
        assert RoleGroup(RLRoleType.ROLLOUT, group="prefill").ranks == (0, 1)
        assert repr(decode) == "<RoleGroup ROLLOUT/decode>"
        with pytest.raises(RoleNotFound, match="ROLLOUT/decode has 3 members; there is no member 3"):
            decode[3]


def test_errors_list_the_groups_that_there_are() -> None:
    with InProcessCluster() as cluster:
        cluster.serve("ROLLOUT", *map(Rollout, range(2)), groups={"prefill": 1, "decode": 1})
        cluster.serve("ACTOR", Rollout(0))
        with pytest.raises(RoleNotFound, match=r"'prefil' \(its groups: prefill, decode\); did you mean prefill\?"):
            RoleGroup("ROLLOUT/prefil").call("which")
        with pytest.raises(RoleNotFound, match="ACTOR has no group 'prefill' and no other group"):
            len(RoleGroup("ACTOR/prefill"))
        with pytest.raises(RoleNotFound, match=r"no role 'ROLOUT'.*did you mean ROLLOUT"):
            len(RoleGroup("ROLOUT/prefill"))


def test_a_groups_members_come_back_into_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with LocalCluster(run_root=tmp_path):
        groups_job.build(out).submit("groups")
    seen = json.loads(out.read_text())
    assert [member[:3] for member in seen["prefill"]] == [[0, "prefill", 0]]
    assert [member[:3] for member in seen["decode"]] == [[1, "decode", 0], [2, "decode", 0]]
    assert seen["all"] == 3
    assert seen["batch"] == [[1, 0], [1, 2], [1, 4], [2, 6], [2, 8]]
    assert [member[:3] for member in seen["again"]] == [[1, "decode", 0], [2, "decode", 1]]
    assert seen["again"][0] == seen["decode"][0] and seen["any"] == "prefill"
    assert "ENGINE has no group 'prefil' (its groups: prefill, decode)" in seen["error"]

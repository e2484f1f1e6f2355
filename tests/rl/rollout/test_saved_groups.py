"""Groups as plain values: the same group comes back, through JSON and arrays alone."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from rlmesh.rl.rollout.saved_groups import plain_group, whole_group
from rlmesh.rl.types import Abstain, Episode, Failed, Group, Score, Turn


def through_files(value: Any) -> Any:
    """The value after a way through JSON, with arrays beside it that are read without pickles."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def put(one: Any) -> Any:
        assert isinstance(one, np.ndarray), f"{one!r} is no plain value"
        arrays[name := f"a{len(arrays)}"] = one
        return {"array": name}

    text = json.dumps(value, default=put)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    read = np.load(io.BytesIO(file.getvalue()), allow_pickle=False)
    return json.loads(text, object_hook=lambda one: read[one["array"]] if [*one] == ["array"] else one)


def test_a_group_comes_back_as_it_was() -> None:
    said, tool = Turn.said([1, 2, 3]), Turn.said([7])
    first = Turn(
        np.array([4, 5], np.int32), "policy", np.array([-0.25, -1.5], np.float32), np.array([-0.1, 0.0], np.float32),
        version_spans=((3, 0, 1), (4, 1, 2)),
    )  # fmt: skip
    last = Turn(np.array([9], np.int32), "policy", np.array([-2.0], np.float32), version_spans=((4, 0, 1),))
    group = Group(
        (2, 5),
        (
            Episode(
                (said, first, tool, last), "time", {"r": Score(0.5, {"n": 2.0}, "half"), "s": Abstain("other data")}
            ),
            Episode((said, last), "stop", {"r": Failed("no answer")}, {"turns": 1}),
        ),
        {"index": 5},
    )
    again = whole_group(through_files(plain_group(group)), (2, 5), {"index": 5})
    assert again.key == group.key and again.row == group.row and len(again) == 2
    for one, other in zip(group.episodes, again.episodes, strict=True):
        assert (one.finish_reason, one.outcomes, one.extras) == (other.finish_reason, other.outcomes, other.extras)
        assert one.versions == other.versions
        for turn, copy in zip(one.turns, other.turns, strict=True):
            assert turn.source == copy.source and tuple(turn.version_spans) == tuple(copy.version_spans)
            for name in ("ids", "log_probs", "kept_log_mass"):
                mine, theirs = getattr(turn, name), getattr(copy, name)
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.dtype == theirs.dtype and (mine == theirs).all()

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlmesh.rl.engines.rollout import Sample
from rlmesh.rl.types import Episode, Group, Score, Turn

IDS = np.array([7, 8], dtype=np.int32)
NUMBERS = np.array([-0.5, -1.0], dtype=np.float32)


def test_masks_come_from_the_sources_of_turns() -> None:
    mass = np.array([-0.1, -0.2], dtype=np.float32)
    said, sampled = Turn.said([1, 2, 3]), Turn(IDS, "policy", NUMBERS, mass, version_spans=((4, 0, 1), (5, 1, 2)))
    episode = Episode((said, sampled, Turn.said([9]), Turn(IDS[:1], "policy", NUMBERS[:1], version_spans=((6, 0, 1),))))
    assert episode.ids.tolist() == [1, 2, 3, 7, 8, 9, 7] and len(episode) == 7
    assert episode.mask.tolist() == [False] * 3 + [True] * 2 + [False, True]
    assert episode.per_token("log_probs").tolist() == [0, 0, 0, -0.5, -1, 0, -0.5]
    np.testing.assert_allclose(episode.per_token("kept_log_mass"), [0, 0, 0, -0.1, -0.2, 0, 0])
    assert (episode.response_tokens, episode.policy_version) == (3, 4)
    assert episode.prompt_ids.tolist() == [1, 2, 3]


def test_a_sample_is_an_episode_of_two_turns() -> None:
    episode = Episode.of(Sample.of([1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], version=2, finish_reason="length"))
    assert episode.ids.tolist() == [1, 2, 3, 4, 5] and episode.mask.tolist() == [False, False, True, True, True]
    assert (episode.finish_reason, episode.policy_version) == ("length", 2)
    assert Episode.of(Sample.of([1], [], [], version=0)).policy_version is None


def test_samples_of_one_prompt_share_its_turn() -> None:
    prompts = [[1, 2], [1, 2], [1, 3], [1, 3], [1, 2]]
    samples = [Sample.of(prompt, [place], [-1.0], version=place) for place, prompt in enumerate(prompts)]
    episodes = Episode.of_group(samples)
    assert [one.ids.tolist() for one in episodes] == [[*prompt, place] for place, prompt in enumerate(prompts)]
    assert episodes[0].turns[0] is episodes[1].turns[0] is not episodes[2].turns[0] is episodes[3].turns[0]
    assert [one.sampled_by(1) for one in episodes] == [False, True, False, False, False]
    assert Episode.of(Sample.of([1], [], [], version=0)).sampled_by(3), "no token is of another version"
    of_array = replace(samples[0], prompt_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert [one.prompt_ids.tolist() for one in Episode.of_group([of_array, of_array])] == [[1, 2]] * 2
    with pytest.raises(ValueError, match="begins with a prompt"):
        Episode.of_group([Sample.of([], [3], [-1.0], version=0)])


def test_wrong_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="'policy' or 'environment'"):
        Turn(IDS, "user")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int32"):
        Turn(IDS.astype(np.int64), "environment")
    with pytest.raises(ValueError, match="nobody sampled it"):
        Turn(IDS, "environment", NUMBERS)
    with pytest.raises(ValueError, match="as many log-probabilities, got None"):
        Turn(IDS, "policy")
    with pytest.raises(ValueError, match="as many masses"):
        Turn(IDS, "policy", NUMBERS, NUMBERS[:1], version_spans=((0, 0, 2),))
    with pytest.raises(ValueError, match="as many versions"):
        Turn(IDS, "policy", NUMBERS, version_spans=((0, 0, 1),))


def test_an_episode_begins_with_a_prompt_and_a_group_has_an_episode() -> None:
    for turns in ((), (Turn.said([]),), (Turn(IDS, "policy", NUMBERS, version_spans=((0, 0, 2),)),)):
        with pytest.raises(ValueError, match="begins with a prompt"):
            Episode(turns)
    with pytest.raises(ValueError, match="has no episode"):
        Group((0, 1), ())
    group = Group((0, 1), (Episode((Turn.said([1]),)),) * 2)
    assert len(group) == 2 and len(Group.episodes_of([group, group])) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_a_score_is_a_finite_number(value: object) -> None:
    with pytest.raises(ValueError, match="finite number"):
        Score(value)  # type: ignore[arg-type]
    assert Score(np.float32(0.5)).value == 0.5  # type: ignore[arg-type]

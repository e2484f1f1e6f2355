"""Samples of a run: written in the background and private, searched, and shown."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.evaluation.settings import SampleSettings
from rlmesh.rl.samples.files import read_file, sample_files
from rlmesh.rl.samples.pages import as_html
from rlmesh.rl.samples.search import changed, chosen_files, find, parse_condition
from rlmesh.rl.samples.writer import SampleWriter
from rlmesh.rl.types import Episode, Failed, Group, Outcome, Score, Turn
from tests.own_time import HANG_S

LETTERS = "0abcdefgh"


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[number] for number in ids)


def episode(response: str, outcome: Outcome, version: int = 0) -> Episode:
    ids = np.asarray([LETTERS.index(letter) for letter in response], np.int32)
    spans = ((version, 0, 1), (version + 1, 1, len(ids))) if len(ids) > 1 else ((version, 0, len(ids)),)
    turn = Turn(ids, "policy", np.full(len(ids), -0.5, np.float32), version_spans=spans)
    return Episode((Turn.said([1, 2]), turn), "length", {"is_a": outcome})


def group(index: int, *episodes: Episode, prompt: str = "ab") -> Group:
    ids = np.asarray([LETTERS.index(letter) for letter in prompt], np.int32)
    own = tuple(replace(one, turns=(Turn(ids, "environment"), *one.turns[1:])) for one in episodes)
    return Group((0, index), own, {"ground_truth": "a", "data_source": "letters"})


def total(episode: Episode) -> Outcome:
    return episode.outcomes["is_a"]


def written(run_dir: Path, steps: dict[int, list[Group]], settings: SampleSettings | None = None) -> SampleWriter:
    writer = SampleWriter(run_dir, settings or SampleSettings(), decode)
    for step, groups in steps.items():
        first = groups[0].episodes[0]
        writer.add(step, groups, total, advantages={id(first): 0.25})
    writer.close(HANG_S)
    return writer


def test_a_sample_has_its_texts_tokens_rewards_and_versions(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    said = Score(0.5, metrics={"letters": 3.0}, reason="half", answer="abc")
    written(tmp_path, {7: [group(4, episode("abc", said, version=5), episode("d", Failed("timeout")))]})
    (file,) = sample_files(tmp_path)
    assert (file.split, file.step) == ("train", 7)
    first, second = pq.read_table(file.path).to_pylist()
    assert {name: first[name] for name in ("prompt", "response", "ground_truth", "data_source", "answer", "said")} == {
        "prompt": "ab", "response": "abc", "ground_truth": "a", "data_source": "letters", "answer": "abc",
        "said": "half",
    }  # fmt: skip
    assert first["prompt_ids"] == [1, 2] and first["response_ids"] == [1, 2, 3]
    assert first["response_mask"] == [True] * 3 and first["log_probs"] == [-0.5] * 3
    assert (first["reward"], first["reward/is_a"], first["reward/is_a/letters"], first["advantage"]) == (
        0.5,
        0.5,
        3,
        0.25,
    )
    assert (first["first_version"], first["last_version"], first["versions"]) == (5, 6, "[[5, 0, 1], [6, 1, 3]]")
    assert (first["step"], first["epoch"], first["index"], first["sample"], first["tokens"]) == (7, 0, 4, 0, 3)
    # A failure is no reward of 0.
    assert second["reward"] is None and second["reward/is_a"] is None and second["said"] == "failed: timeout"
    assert second["advantage"] is None


def test_each_sample_has_the_prompt_of_its_own_episode(tmp_path: Path) -> None:
    """An environment or an agent may begin the episodes of a group differently."""
    episodes = [group(0, episode("a", Score(1.0)), prompt=prompt).episodes[0] for prompt in ("ab", "abc", "abc", "d")]
    written(tmp_path, {1: [group(0, episode("b", Score(0.0)))], 2: [Group((0, 1), tuple(episodes), {})]})
    samples = find(sample_files(tmp_path))
    assert [one["prompt"] for one in samples] == ["ab", "ab", "abc", "abc", "d"]


def test_files_are_private_and_a_repeated_step_replaces_its_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path, {1: [group(0, episode("a", Score(0.0)))]})
        written(tmp_path, {1: [group(0, episode("b", Score(1.0)))]})
    finally:
        os.umask(before)
    (file,) = sample_files(tmp_path)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert [one["response"] for one in read_file(file)] == ["b"]
    assert [one.name for one in file.path.parent.iterdir()] == [file.path.name]


def test_the_training_never_waits_for_a_slow_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmesh.rl.samples.writer.MOST_TOKENS", 4 * 3)  # four steps of three tokens
    began, go = threading.Event(), threading.Event()

    def slow(ids: Sequence[int]) -> str:
        began.set()
        assert go.wait(HANG_S)
        return decode(ids)

    writer = SampleWriter(tmp_path, SampleSettings(), slow)
    writer.add(1, [group(0, episode("a", Score(0.0)))], total)
    assert began.wait(HANG_S)
    for step in range(2, 9):
        writer.add(step, [group(0, episode("a", Score(0.0)))], total)
    go.set()
    writer.close(HANG_S)
    # The first one was being written; of the others the oldest three were dropped.
    assert [file.step for file in sample_files(tmp_path)] == [1, 5, 6, 7, 8]
    assert "were dropped" in caplog.text and "samples of 3 steps are missing" in caplog.text


def test_a_disk_error_is_logged_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("in the way")
    writer = SampleWriter(tmp_path, SampleSettings(), decode)
    waits: list[Callable[[], bool]] = []
    for step in (1, 2):
        writer.add(step, [group(0, episode("a", Score(0.0)))], total)
        waits.append(lambda step=step: writer.lost == step)  # type: ignore[misc]
        wait_for(waits[-1])
    (tmp_path / "samples").unlink()
    writer.add(3, [group(0, episode("a", Score(0.0)))], total)
    writer.close(HANG_S)
    assert [file.step for file in sample_files(tmp_path)] == [3]
    assert caplog.text.count("could not be written") == 1


def wait_for(condition: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(int(HANG_S / 0.01)):
        if condition():
            return
        ended.wait(0.01)
    raise AssertionError("the condition was not met")


def test_only_every_nth_step_is_kept_and_the_folder_has_a_limit(tmp_path: Path) -> None:
    steps = {step: [group(0, episode("abcd" * 20, Score(0.0)))] for step in range(1, 13)}
    written(tmp_path / "a", steps, SampleSettings(every=5))
    assert [file.step for file in sample_files(tmp_path / "a")] == [5, 10]
    assert not written(tmp_path / "b", steps, SampleSettings(every=0)).lost and not (tmp_path / "b").exists()
    from rlmesh.rl.samples.writer import thin

    for step, groups in steps.items():
        written(tmp_path / "c", {step: groups})
    size = max(file.path.stat().st_size for file in sample_files(tmp_path / "c"))
    thin(tmp_path / "c" / "samples", 4 * size)
    kept = [file.step for file in sample_files(tmp_path / "c")]
    assert kept[0] == 1 and kept[-1] == 12 and len(kept) <= 4


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step, (first, second) in {1: ("h", "a"), 2: ("a", "a"), 3: ("ah", "b")}.items():
        groups = [
            group(0, episode(first, Score(float(first.count("a")) / len(first))), prompt="ab"),
            group(1, episode(second, Score(float(second.count("a")) / len(second))), prompt="cd"),
        ]
        written(tmp_path, {step: groups})
    return tmp_path


def test_samples_are_found_by_step_condition_and_rank(run_dir: Path) -> None:
    last = find(chosen_files(run_dir))
    assert [one["response"] for one in last] == ["ah", "b"]
    every = chosen_files(run_dir, steps="all")
    worst, best = find(every, order="worst", most=2), find(every, order="best", most=1)
    assert sorted(one["response"] for one in worst) == ["b", "h"] and best[0]["reward"] == 1.0
    conditions = [parse_condition("reward/is_a > 0.2"), parse_condition("prompt~^a"), parse_condition("tokens=2")]
    assert [one["response"] for one in find(every, conditions)] == ["ah"]
    assert [one.step for one in chosen_files(run_dir, steps="2-9")] == [2, 3]


def test_samples_of_undone_steps_are_left_out_until_they_are_made_again(tmp_path: Path) -> None:
    written(tmp_path, {step: [group(0, episode("a", Score(0.0)))] for step in range(1, 6)})

    def report(*steps: int) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for step in steps:
                file.write(json.dumps({"at": 1.0, "step": step, "metrics": {"step_time_s": 1.0}}) + "\n")

    report(1, 2, 3, 4)
    assert [one.step for one in chosen_files(tmp_path, steps="all")] == [1, 2, 3, 4, 5], "5 is being trained"
    report(2)
    assert [one.step for one in chosen_files(tmp_path, steps="all")] == [1, 2, 5]
    with pytest.raises(UsageError, match="there are no samples of train at step 3"):
        chosen_files(tmp_path, steps="3")
    report(3, 4)
    assert [one.step for one in chosen_files(tmp_path, steps="all")] == [1, 2, 3, 4, 5]


def test_prompts_that_changed_come_with_the_greatest_change_first(run_dir: Path) -> None:
    found = changed(chosen_files(run_dir, steps="all"), 2)
    assert [(one.prompt, one.before[0]["response"], one.after[0]["response"], one.gain) for one in found] == [
        ("cd", "a", "b", -1.0), ("ab", "a", "ah", -0.5),
    ]  # fmt: skip
    assert [one.prompt for one in changed(chosen_files(run_dir, steps="all"), 1)] == ["cd", "ab"]
    with pytest.raises(UsageError, match="steps up to 3 and after it are needed; there are steps from 1 to 3"):
        changed(chosen_files(run_dir, steps="all"), 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--filter", "reword<1"], "no column 'reword'; did you mean 'reward'?"),
        (["--filter", "reward"], "'reward' is no condition"),
        (["--filter", "reward<many"], "reward is a number, 'many' is none"),
        (["--filter", "prompt<3"], "prompt is a text"),
        (["--filter", "prompt~("], "no regular expression"),
        (["--step", "9"], "no samples of train at step 9; there are 3 steps from 1 to 3, the nearest is 3"),
        (["--step", "last"], "write a number, a range such as 10-20, or all"),
        (["--split", "validation"], "no samples of validation, but of train"),
        (["-n", "0"], "--number 0 must be"),
    ],
)
def test_what_is_wrong_is_said(run_dir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_shows_samples_and_changes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir), "--worst", "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert "1 samples of train, step 3" in shown and "reward 0 " in shown and "response: b" in shown
    assert main(["samples", str(run_dir), "--changed-since", "1"]) == 0
    assert "step 1 → 3  mean reward 1 → 0" in capsys.readouterr().out
    page = run_dir / "page.html"
    assert main(["samples", str(run_dir), "--html", str(page)]) == 0
    assert stat.S_IMODE(page.stat().st_mode) == 0o600 and "<pre>ah</pre>" in page.read_text()


def test_text_of_a_model_has_no_effect_in_terminal_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>\x1b[2J\u202e"
    writer = SampleWriter(tmp_path, SampleSettings(), lambda ids: evil)
    writer.add(1, [group(0, episode("a", Score(0.0, reason=evil)))], total)
    writer.close(HANG_S)
    assert main(["samples", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2J\\u202e" in shown
    page = as_html(evil, find(chosen_files(tmp_path)))
    assert "<script>" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page


def test_files_that_another_user_may_have_made_are_not_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "samples" / "train-00000009.parquet").symlink_to(run_dir / "samples" / "train-00000001.parquet")
    assert [file.step for file in sample_files(run_dir)] == [1, 2, 3]
    file = sample_files(run_dir)[0]
    file.path.chmod(0o666)
    with pytest.raises(UsageError, match="others can change it"):
        read_file(file)
    file.path.chmod(0o600)
    file.path.write_bytes(b"PAR1 torn")
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(file)
    (run_dir / "samples").chmod(0o777)
    assert main(["samples", str(run_dir)]) == 2
    assert "others can put files there" in capsys.readouterr().err

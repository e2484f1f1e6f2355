from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.rl.data import Mixture, PromptLoader, RLHFDataset, load_prompts
from rlmesh.rl.data.files import read_rows, write_parquet
from rlmesh.rl.data.loader import order
from rlmesh.rl.data.prepare.sets import last_boxed, prepare


class Letters:
    """A tokenizer whose tokens are characters, with a chat template where it is asked for."""

    name_or_path = "letters"

    def __init__(self, template: bool = True) -> None:
        self.chat_template = "…" if template else None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options == {"tokenize": True, "add_generation_prompt": True, "return_dict": True}
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def text_of(ids: Any) -> str:
    return "".join(map(chr, ids))


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


CHAT = [{"role": "user", "content": "hi"}]


def test_prompts_are_text_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet([{"prompt": CHAT, "data_source": "a", "reward_model": {"ground_truth": "4"}}], path)
    data = RLHFDataset(path, Letters())
    assert text_of(data[0].ids) == "<user>hi<assistant>" and data[0].row["reward_model"]["ground_truth"] == "4"
    assert data[0].ids.dtype.name == "int32"
    lines = write_lines(tmp_path / "more.jsonl", [{"question": "2 + 2"}])
    assert text_of(RLHFDataset(lines, Letters(False), prompt_key="question")[0].ids) == "2 + 2"
    write_lines(tmp_path / "zzz.jsonl", [{"prompt": "last"}])
    lines.unlink()
    assert [text_of(prompt.ids)[-4:] for prompt in RLHFDataset(tmp_path, Letters())] == ["ant>", "last"]  # type: ignore[attr-defined]


def test_rows_that_are_too_long_or_empty_are_counted() -> None:
    rows = [{"prompt": "x" * n} for n in (3, 9, 5, 0, 12)]
    data = RLHFDataset(rows, Letters(), max_prompt_tokens=8)
    assert str(data.counts) == "5 rows read, 2 too long, 1 empty, 2 left"
    assert [prompt.index for prompt in data] == [0, 2]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"30 rows read, 30 too long, 0 empty, 0 left\..*max_prompt_tokens=2"):
        RLHFDataset([{"prompt": "long"}] * 30, Letters(), max_prompt_tokens=2)


def test_faults_of_the_data_name_the_row() -> None:
    with pytest.raises(UsageError, match=r"has no chat template"):
        RLHFDataset([{"prompt": CHAT}], Letters(False))
    with pytest.raises(
        UsageError, match=r"row 0 has no column 'prompt'.*prompt_key='prompts'.*Row 0: .*\"prompts\": \"hi\""
    ):
        RLHFDataset([{"prompts": "hi"}], Letters())
    with pytest.raises(UsageError, match="row 0 has a int as 'prompt'"):
        RLHFDataset([{"prompt": 3}], Letters())
    with pytest.raises(UsageError, match="row 1: a message has 'role' and 'content'"):
        RLHFDataset([{"prompt": CHAT}, {"prompt": [{"text": "hi"}]}], Letters())
    with pytest.raises(UsageError, match="must be ≥ 1"):
        RLHFDataset([{"prompt": "hi"}], Letters(), limit=0)


def test_compressed_lines_are_read(tmp_path: Path) -> None:
    put(tmp_path / "train.jsonl.gz", {"prompt": "hi"}, {"prompt": "ho"})
    assert [row["prompt"] for row in read_rows(tmp_path)] == ["hi", "ho"]
    (tmp_path / "train.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UsageError, match=r"train\.jsonl\.gz cannot be read"):
        read_rows(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"prompt": "é"}\n'), ("b.json", '[{"prompt": "é"}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read_rows(tmp_path / name) == [{"prompt": "é"}]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    (tmp_path / "b.json").write_text('{"prompt": "x"}')
    (tmp_path / "c.csv").write_text("prompt\n")
    for name in ("latin.jsonl", "latin.json"):
        (tmp_path / name).write_bytes('[{"prompt": "é"}]'.encode("latin-1"))
    (tmp_path / "empty").mkdir()
    for name, message in {
        "train.parquet": "is no parquet file that can be read",
        "trian.parquet": r"there is no data file .*did you mean .*train\.parquet",
        "nowhere/x.parquet": "there is no folder",
        "a.jsonl": r"a\.jsonl:2 is no JSON",
        "latin.jsonl": r"latin\.jsonl cannot be read",
        "latin.json": r"latin\.json cannot be read",
        "b.json": "must hold a list of rows, it holds dict",
        "c.csv": "the suffix must be one of .parquet",
        "empty": "has no .parquet",
    }.items():
        with pytest.raises(UsageError, match=message):
            read_rows(tmp_path / name)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 5), st.booleans())
def test_each_prompt_comes_up_exactly_once_per_epoch(count: int, batch_size: int, seed: int, shuffle: bool) -> None:
    assume(count >= batch_size)
    data = RLHFDataset([{"prompt": str(i)} for i in range(count)], Letters())
    loader = PromptLoader(data, batch_size, seed=seed, shuffle=shuffle)
    steps = loader.steps_of(3)
    drawn = [one for step in range(steps) for one in loader.batch(step)]
    assert len({one.key for one in drawn}) == len(drawn) and len(drawn) == steps * batch_size
    for epoch in range(3):
        assert sorted(index for of, index in (one.key for one in drawn) if of == epoch) == list(range(count))
    assert all(one.prompt.index == one.key[1] for one in drawn)
    again = PromptLoader(data, batch_size, seed=seed, shuffle=shuffle)
    assert [one.key for one in again.batch(steps - 1)] == [one.key for one in loader.batch(steps - 1)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    assert len({tuple(order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}) == 9
    with pytest.raises(UsageError, match="3 prompts are too few for a batch of 4"):
        PromptLoader(RLHFDataset([{"prompt": "x"}] * 3, Letters()), 4)
    with pytest.raises(UsageError, match="batch_size=0"):
        PromptLoader(RLHFDataset([{"prompt": "x"}] * 3, Letters()), 0)


@pytest.mark.parametrize(
    ("sizes", "weights", "parts"),
    [((10, 10), (3, 1), [10, 3]), ((3, 9), (0.9, 1.79), [3, 6]), ((7, 9), (1, 0.25), [7, 2]), ((2, 5), (2, 1), [2, 1])],
)
def test_the_parts_of_a_mixture_are_the_nearest_to_its_weights(
    sizes: tuple[int, int], weights: tuple[float, float], parts: list[int]
) -> None:
    sets = [
        RLHFDataset([{"prompt": name * (i + 1)} for i in range(size)], Letters())
        for name, size in zip("ab", sizes, strict=True)
    ]
    mixture = Mixture(sets, weights)
    texts = [text_of(mixture[i].ids)[0] for i in range(len(mixture))]
    assert [texts.count("a"), texts.count("b")] == parts


def test_a_weight_of_less_than_a_prompt_is_refused_and_not_made_larger() -> None:
    sets = [RLHFDataset([{"prompt": f"{name}{i}"} for i in range(100)], Letters()) for name in "ab"]
    with pytest.raises(UsageError, match=r"data set 1 0\.1 prompts in an epoch.*10 times as large as its weight says"):
        Mixture(sets, [1000, 1])
    assert len(Mixture(sets, [100, 1])) == 101


def test_mixtures_have_their_proportions_and_repeat_nothing() -> None:
    few = RLHFDataset([{"prompt": f"a{i}"} for i in range(10)], Letters())
    many = RLHFDataset([{"prompt": f"b{i}"} for i in range(100)], Letters())
    mixture = Mixture([few, many], [1, 3])
    texts = [text_of(mixture[i].ids) for i in range(len(mixture))]
    assert len(set(texts)) == len(texts) == 40
    assert sum(text.startswith("a") for text in texts) == 10
    assert len(Mixture([few, many])) == 110
    assert [text_of(Mixture([few, many], [1, 3], seed=1)[i].ids) for i in range(40)] != texts
    for wrong in ([], [1], [1, 0]):
        with pytest.raises(UsageError):
            Mixture([few, many][: 2 if wrong else 0], wrong)
    with pytest.raises(IndexError):
        mixture[40]
    # Epoch after epoch, all prompts of the larger set are used.
    loader = PromptLoader(mixture, 40)
    epochs = [sorted(text_of(one.prompt.ids) for one in loader.batch(step)) for step in range(4)]
    assert all(sum(text.startswith("a") for text in each) == 10 for each in epochs)
    assert len({text for each in epochs[:3] for text in each}) == 100
    assert len({text for each in epochs for text in each}) == 110
    assert [sorted(text_of(one.prompt.ids) for one in PromptLoader(mixture, 40).batch(3))] == epochs[3:]


def test_files_are_mixed_by_their_weights(tmp_path: Path) -> None:
    for name, count in (("a", 10), ("b", 100)):
        write_lines(
            tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(count)] + [{"prompt": "x" * 9}]
        )
    files = {str(tmp_path / "a.jsonl"): 1, str(tmp_path / "b.jsonl"): 3}
    mixed = load_prompts(files, Letters(), max_prompt_tokens=8, seed=2)
    assert len(mixed) == 40 and str(mixed.counts) == "112 rows read, 2 too long, 0 empty, 110 left"
    assert len(load_prompts(tmp_path / "a.jsonl", Letters())) == 11
    for wrong in ({}, {"a": "1"}, {str(tmp_path / "a.jsonl"): 0}, {str(tmp_path / "a.jsonl"): float("nan")}):
        with pytest.raises(UsageError, match="weights > 0"):
            load_prompts(wrong, Letters())


PREPARED: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "gsm8k": (
        {"question": "2 + 2?", "answer": "So 4.\n#### 1,004"},
        "openai/gsm8k",
        "1004",
        'output the final answer after "####"',
    ),
    "math": (
        {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
        "lighteval/MATH",
        r"\frac{1}{2}",
        r"within \boxed{}",
    ),
    "hellaswag": (
        {"ctx": "[header] He jumps. [step] Then", "endings": ["he lands.", "it rains.", "no", "yes"], "label": "1"},
        "Rowan/hellaswag",
        "B",
        "A. he lands.\nB. it rains.",
    ),
    "hh_rlhf": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: go away"},
        "Anthropic/hh-rlhf",
        None,
        "hi",
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_data_sets_are_prepared(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, source, truth, part = PREPARED[name]
    (tmp_path / "raw").mkdir()
    write_lines(tmp_path / "raw" / "train-00000-of-00001.jsonl", [row, row])
    write_parquet([row], tmp_path / "raw" / "test.parquet")
    assert main(["prepare", name, "--from", str(tmp_path / "raw"), "--to", str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out' / 'train'}.parquet: 2 rows" in capsys.readouterr().out
    rows = read_rows(tmp_path / "out" / "train.parquet")
    assert [r["data_source"] for r in rows] == [source] * 2 and rows[1]["extra_info"]["index"] == 1
    assert rows[0]["reward_model"]["ground_truth"] == truth and part in rows[0]["prompt"][0]["content"]
    assert len(RLHFDataset(tmp_path / "out" / "test.parquet", Letters())) == 1


def put(path: Path, *rows: Mapping[str, Any]) -> None:
    """Write a file in the form that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_parquet(map(dict, rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows[0]))
    else:
        write_lines(path, list(rows))


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("gsm8k", ["train.jsonl", "test.jsonl", "train_socratic.jsonl"], {"train": 1, "test": 1}),
        ("gsm8k", ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"], {"train": 1, "test": 1}),
        ("math", ["train/algebra/1.json", "train/geometry/1.json", "test/algebra/1.json"], {"train": 2, "test": 1}),
        ("hellaswag", ["hellaswag_train.jsonl", "hellaswag_val.jsonl"], {"train": 1, "validation": 1}),
        ("hellaswag", ["data/train-00000-of-00001.parquet", "data/validation.parquet"], {"train": 1, "validation": 1}),
        ("hh_rlhf", ["helpful-base/train.jsonl.gz", "harmless-base/train.jsonl.gz"], {"train": 2}),
    ],
)
def test_the_usual_files_of_a_set_are_known(name: str, files: list[str], expected: Any, tmp_path: Path) -> None:
    for file in files:
        put(tmp_path / "raw" / file, PREPARED[name][0])
    assert prepare(name, tmp_path / "raw", tmp_path / "out") == expected
    assert {path.stem: len(read_rows(path)) for path in (tmp_path / "out").iterdir()} == expected


def test_versions_of_a_set_are_not_mixed(tmp_path: Path) -> None:
    for file in ("main/train.parquet", "main/test.parquet", "socratic/train.parquet"):
        put(tmp_path / "raw" / file, PREPARED["gsm8k"][0])
    with pytest.raises(
        UsageError, match=r"several folders with a split 'train': give one .*raw/main or .*raw/socratic"
    ):
        prepare("gsm8k", tmp_path / "raw", tmp_path / "out")
    put(tmp_path / "odd" / "examples.jsonl", {})
    with pytest.raises(UsageError, match=r"has no .* file of a split \(train, test.*it has examples\.jsonl"):
        prepare("gsm8k", tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_without_answers_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = PREPARED["hellaswag"][0]
    put(tmp_path / "train.jsonl", row)
    put(tmp_path / "test.jsonl", row | {"label": ""}, row | {"label": ""})
    assert main(["prepare", "hellaswag", "--from", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "train.parquet: 1 rows" in out and "test.parquet: not written, since its rows have no right answers" in out
    put(tmp_path / "test.jsonl", row, row | {"label": ""})
    with pytest.raises(UsageError, match="the label '' is none of the 4 endings"):
        prepare("hellaswag", tmp_path, tmp_path / "out")


def test_dialogues_become_messages(tmp_path: Path) -> None:
    asked = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why\n\nHuman: is that"
    put(tmp_path / "train.jsonl", {"chosen": f"{asked}\n\nAssistant: so", "rejected": f"{asked}\n\nAssistant: no"})
    prepare("hh_rlhf", tmp_path, tmp_path / "out")
    (row,) = read_rows(tmp_path / "out")
    assert row["prompt"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "why\n\nis that"},
    ]
    assert (row["extra_info"]["chosen"], row["extra_info"]["rejected"]) == ("so", "no")
    put(tmp_path / "train.jsonl", {"chosen": asked, "rejected": asked})
    with pytest.raises(UsageError, match="row 0 of Anthropic/hh-rlhf: the dialogue has no question, or does not end"):
        prepare("hh_rlhf", tmp_path, tmp_path / "out")


def test_rows_of_another_form_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row, message in (
        ({"question": "2 + 2?"}, "row 0 of openai/gsm8k has no answer: it has question"),
        ({"question": "2 + 2?", "answer": "4"}, "row 0 of openai/gsm8k: the answer has no ####"),
    ):
        write_lines(tmp_path / "train.jsonl", [row])
        assert main(["prepare", "gsm8k", "--from", str(tmp_path / "train.jsonl"), "--to", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["prepare", "gsm8k", "--from", str(tmp_path / "none"), "--to", str(tmp_path)]) == 2
    assert main(["prepare", "gsm8k", "--from", str(tmp_path), "--to", str(tmp_path)]) == 2
    assert "write to another folder" in capsys.readouterr().err


def test_boxed_answers_keep_their_braces() -> None:
    assert last_boxed(r"\boxed{1} then \boxed{a_{b{c}}}") == "a_{b{c}}"
    assert last_boxed("none") is None and last_boxed(r"\boxed{open") is None

"""Secrets are masked in what is meant for reading, and nothing else is."""

from __future__ import annotations

import time

import pytest

from rlmesh.job import masking
from rlmesh.job.masking import is_secret, mask_text, mask_texts, masked, register_secrets, secrets_in

SECRET = (
    "HF_TOKEN", "api_key", "APIKEY", "apiKey", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "password", "DB_PASSWD",
    "PGPASSWORD", "MY_PWD", "client-secret", "Authorization", "credentials", "authToken", "ssh_key", "auth",
    "passphrase", "GITHUB_PAT", "session_cookie", "bearer",
)  # fmt: skip
OPEN = (
    "tokenizer", "TOKENIZERS_PARALLELISM", "monkey", "keyboard", "author", "PWD", "compass", "lr", "passes", "path",
    "author_name", "turkey", "bypass", "HOME",
)  # fmt: skip


@pytest.mark.case("a01")
def test_secrets_are_known_by_their_names() -> None:
    assert [name for name in SECRET if not is_secret(name)] == []
    assert [name for name in OPEN if is_secret(name)] == []


@pytest.mark.case("a01")
def test_values_are_masked_by_their_names() -> None:
    found = masked(
        {
            "env": {"HF_TOKEN": "abc", "LEVEL": "3"},
            "secrets": {"first": "abc", "tries": 3, "none": None},
            "keys": ["abc", "def"],
            "max_tokens": 512,
            "pad_token_id": 0,
            "MAX_TOKENS": "512",
            "password": 1234,
            "api_key": "",
            "token": None,
            "url": "redis://:pw@host:1/0",
        }
    )
    assert found == {
        "env": {"HF_TOKEN": "***", "LEVEL": "3"},
        "secrets": {"first": "***", "tries": "***", "none": None},
        "keys": ["***", "***"],
        "max_tokens": 512, "pad_token_id": 0, "MAX_TOKENS": "512", "password": "***", "api_key": "", "token": None,
        "url": "redis://:***@host:1/0",
    }  # fmt: skip


@pytest.mark.case("a01")
@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("postgres://me:pw@db:5432/x failed", "postgres://me:***@db:5432/x failed"),
        ("GET https://x.org/a?api_key=abc&page=2", "GET https://x.org/a?api_key=***&page=2"),
        ("train.py --api-key abc --n 3 --token=def", "train.py --api-key *** --n 3 --token=***"),
        ("Authorization: Bearer abcdefgh.123", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic YWJj', 'x': 1}", "{'Authorization': 'Basic ***', 'x': 1}"),
        ("client_secret='abc', n=3", "client_secret='***', n=3"),
        ("logged in with hf_abcdefghijklmnopqrstuv", "logged in with ***"),
        ("logged in with github_pat_abcdefghijklmnopqrstuv", "logged in with ***"),
        ("password: hunter2", "password: ***"),
    ],
)
def test_secrets_in_texts_are_masked(text: str, becomes: str) -> None:
    assert mask_text(text) == becomes
    assert mask_texts({"a": [text, 3]}) == {"a": [becomes, 3]}


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=512, tokens: 12 of 13", "tokenizer=gpt2", "http://host:8000/path", "the token is invalid",
        "ACTOR:0 (pid 71 on box) was killed by SIGKILL", "File \"/a/keys.py\", line 3 in get_key", "ssh://git@host/x",
        "step 3: reward_mean 0.5", "KeyError: 'lr'", "tcp://10.0.0.1:4000",
        "ROLLOUT:0: model.embed_tokens.weight: the source has float32", "ended by signal 9",
        "TokenWeights.of: advantages has shape (3,)",
    ],
)  # fmt: skip
def test_other_texts_stay(text: str) -> None:
    assert mask_text(text) == text


def test_known_secrets_are_found_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    register_secrets(
        secrets_in({"MY_PASSWORD": "correct horse", "SHORT_TOKEN": "ab", "NAME": "correct", "MAX_TOKENS": "123456"})
    )
    assert mask_text("said correct horse, ab, correct, 123456") == "said ***, ab, correct, 123456"


@pytest.mark.parametrize("piece", ["a", "x-", "token", " ", "a://", "--token ", "key=", "://a:", "passw", "https://a@"])
def test_the_time_of_masking_grows_with_the_text_only(piece: str) -> None:
    def seconds(size: int) -> float:
        text = "key " + piece * (size // len(piece))
        began = time.process_time()
        mask_text(text)
        return time.process_time() - began

    seconds(1000)
    assert seconds(100_000) < 0.1 + 100 * min(seconds(10_000) for _ in range(3)), "it would be more if it were squared"
    assert seconds(100_000) < 5.0

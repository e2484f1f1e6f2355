"""Masking of secrets in output for people: ``job.json``, incidents, ``status``, error texts.

A value is masked if its name says that it is a secret (``WANDB_API_KEY``, ``db_password``, ``Authorization``), and
a part of a text if its form does: ``https://user:password@host``, ``?token=…``, ``--api-key …``, ``Bearer …``, and the
tokens of well-known services. The job itself gets the real values on private channels.

In doubt, values are masked; numbers called ``max_tokens`` or ``pad_token_id`` stay readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

__all__ = ["MASK", "is_secret", "mask_text", "mask_texts", "masked", "register_secrets", "secrets_in"]

MASK = "***"
SHORTEST_KNOWN = 6
"""Minimum length of a value that is searched for in other texts; shorter ones would match everywhere."""

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_ANYWHERE = re.compile(r"secret|passw|passphrase|credential|authoriz|bearer|cookie|token(?!iz|is)", re.I)
_WORDS = frozenset({"auth", "cred", "creds", "key", "keys", "pass", "pat", "pwd", "pw"})
_ENDS_IN_KEY = re.compile(
    r"(?:access|api|auth|encryption|host|license|master|private|secret|shared|signing|ssh)_?keys?$"
)
_ABOUT_TOKENS = re.compile(r"token|key", re.I)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.I)

# Repetitions are bounded, so that matching takes linear time.
# The weight embed_tokens.weight is no token, nor is the class TokenWeights.
_NAMED = (
    r"[\w.-]{0,40}(?:token(?!iz|is|s\.|weights\.)|secret|passw|passphrase|credential|"
    r"api[_-]?key|access[_-]?key|private[_-]?key)[\w.-]{0,40}"
)
_GAP = r"['\"]?\s{0,8}[:=]\s{0,8}['\"]?"
_VALUE = r"[^\s'\",;}&]+"

_HINT = re.compile(
    r"://|token|secret|pass|key|auth|bearer|credential|[?&]sig|AKIA|\b(?:sk|hf|gh[pos]|github_pat|glpat|xox[bp])[-_]",
    re.I,
)
"""A text without any of these has nothing to mask. ``ended by signal 9`` has none: news of a death compile nothing."""
_known: set[str] = set()


@cache
def _texts() -> tuple[tuple[re.Pattern[str], str], ...]:
    """The patterns of secrets in texts, compiled when the first text needs them and not in every process of a job."""
    return (
        (re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@'\"]{0,200}:)[^\s/@'\"]{1,500}(?=@)", re.I), rf"\g<1>{MASK}"),
        (re.compile(rf"([?&](?:{_NAMED}|key|sig|signature|auth)=)[^&\s'\"#]+", re.I), rf"\g<1>{MASK}"),
        (re.compile(rf"(--?(?:{_NAMED})(?:=|\s{{1,8}}))(?!-)[^\s,'\"]+", re.I), rf"\g<1>{MASK}"),
        (re.compile(rf"(authorization{_GAP}(?:\w{{1,20}} {{1,8}})?){_VALUE}", re.I), rf"\g<1>{MASK}"),
        (re.compile(r"\b(bearer\s{1,8})[A-Za-z0-9._~+/=-]{8,}", re.I), rf"\g<1>{MASK}"),
        (re.compile(rf"(\b(?:{_NAMED}){_GAP})(?![\d.]+\b){_VALUE}", re.I), rf"\g<1>{MASK}"),
        (re.compile(r"\b(?:sk|hf|ghp|gho|ghs|glpat|xoxb|xoxp|github_pat)[-_][A-Za-z0-9_-]{16,}"), MASK),
        (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), MASK),
    )  # fmt: skip


def is_secret(name: str) -> bool:
    """True if a variable, a key or a field of this name holds a secret."""
    if _ANYWHERE.search(name):
        return True
    if name == "PWD":  # the working directory
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    return not _WORDS.isdisjoint(words) or bool(_ENDS_IN_KEY.search(name.lower()))


def masked(value: Any, name: str = "") -> Any:
    """Return plain data (as from JSON) with secrets masked; ``name``: the name of the value."""
    if isinstance(value, Mapping):
        secret = bool(name) and is_secret(name)
        return {key: masked(item, name if secret and not is_secret(str(key)) else str(key))
                for key, item in value.items()}  # fmt: skip
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if name and value is not None and not isinstance(value, bool) and is_secret(name):
        plain = isinstance(value, int | float) or bool(_NUMBER.fullmatch(str(value)))
        return value if value == "" or (plain and _ABOUT_TOKENS.search(name)) else MASK
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """Return a text in which everything with the form of a secret, and each registered secret, is masked."""
    for secret in _known:
        text = text.replace(secret, MASK)
    if _HINT.search(text):
        for pattern, instead in _texts():
            text = pattern.sub(instead, text)
    return text


def mask_texts(value: Any) -> Any:
    """Return plain data in which each text is masked, independently of its name."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {key: mask_texts(item) for key, item in value.items()}
    return [mask_texts(item) for item in value] if isinstance(value, list | tuple) else value


def register_secrets(secrets: Iterable[str]) -> None:
    """Register secrets that are masked in all output of this process, even if their form does not show them."""
    _known.update(secrets)


def secrets_in(env: Mapping[str, str]) -> set[str]:
    """Return the values of secret variables that are long enough to be found in other texts."""
    return {value for name, value in env.items() if len(value) >= SHORTEST_KNOWN and masked(value, name) == MASK}

"""Samples for people: as lines of text, or as a self-contained HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rlmesh.rl.samples.files import Sampled
from rlmesh.rl.samples.search import ChangedPrompt

__all__ = ["as_html", "as_text", "change_as_text"]

LONGEST = 2000
"""Characters of a prompt or a response that the text form shows."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
article { border-top: 1px solid #ccc; padding: .8em 0 } pre { white-space: pre-wrap; overflow-wrap: anywhere;
background: #f6f6f4; padding: .6em; margin: .3em 0 } h2 { font-size: 1em; margin: .2em 0 } .low { color: #a11 }
.high { color: #171 } table { border-collapse: collapse; font-size: .9em } td { padding: .1em 1em .1em 0 }
@media (prefers-color-scheme: dark) { body { background: #191919; color: #ddd } pre { background: #252525 }
article { border-color: #444 } .low { color: #f88 } .high { color: #8d8 } }
"""


def as_text(sample: Sampled, *, whole: bool = False) -> str:
    """A sample as lines.

    Args:
        sample: its columns.
        whole: show long texts in full.
    """
    lines = [headline(sample), f"  prompt:   {_cut(sample['prompt'], whole)}"]
    if sample.get("ground_truth") is not None:
        lines.append(f"  truth:    {_cut(sample['ground_truth'], whole)}")
    lines.append(f"  response: {_cut(sample['response'], whole)}")
    lines += [f"  {name}: {value}" for name, value in rewards_of(sample)]
    return "\n".join(lines)


def change_as_text(change: ChangedPrompt, *, whole: bool = False) -> str:
    """A prompt at two steps as lines: the first sample of each."""
    old, new = change.before[0], change.after[0]
    return "\n".join(
        [
            f"step {old['step']} → {new['step']}  mean reward {_mean(change.before)} → {_mean(change.after)}  "
            f"({len(change.before)} and {len(change.after)} samples)",
            f"  prompt: {_cut(change.prompt, whole)}",
            f"  before: {_cut(old['response'], whole)}  [{_number(old['reward'])}]",
            f"  after:  {_cut(new['response'], whole)}  [{_number(new['reward'])}]",
        ]
    )


def headline(sample: Sampled) -> str:
    """Position (step, prompt, number) and reward of a sample in one line."""
    versions = _span(sample.get("first_version"), sample.get("last_version"))
    parts = [
        f"step {sample['step']}",
        f"{sample['split']} prompt {sample['index']} sample {sample['sample']}",
        f"reward {_number(sample['reward'])}",
        f"advantage {_number(sample['advantage'])}" if sample.get("advantage") is not None else "",
        f"{sample['tokens']} tokens ({sample['finish_reason']})",
        f"version {versions}" if versions else "",
        str(sample["data_source"]) if sample.get("data_source") else "",
    ]
    return "  ".join(part for part in parts if part)


def rewards_of(sample: Sampled) -> Iterator[tuple[str, str]]:
    """Pairs of a reward's name and its text: the score or the reason, and the metrics."""
    for name, value in sample.items():
        if name.startswith("reward/") and not name.endswith("/said"):
            said = sample.get(f"{name}/said")
            if value is not None or said:
                yield name, f"{_number(value)}{f'  {said}' if said else ''}"


def as_html(title: str, samples: Sequence[Sampled] = (), changes: Sequence[ChangedPrompt] = ()) -> str:
    """A page with samples, or with prompts that changed. It has no script, and loads nothing."""
    body = [f"<h1>{_safe(title)}</h1>"]
    body += [_article(sample) for sample in samples]
    for change in changes:
        old, new = change.before[0]["step"], change.after[0]["step"]
        body.append(
            f"<article><h2>step {old} → {new}: mean reward {_mean(change.before)} → "
            f"<span class={_class(change.gain)}>{_mean(change.after)}</span></h2><pre>{_safe(change.prompt)}</pre>"
        )
        for step, samples_of in ((old, change.before), (new, change.after)):
            body.append(f"<details open><summary>step {step}</summary>")
            body += [f"<pre>{_safe(one['response'])}</pre>reward {_number(one['reward'])}" for one in samples_of]
            body.append("</details>")
        body.append("</article>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        f"<meta name=viewport content='width=device-width'><title>{_safe(title)}</title><style>{_STYLE}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def _article(sample: Sampled) -> str:
    rows = "".join(f"<tr><td>{_safe(name)}<td>{_safe(value)}" for name, value in rewards_of(sample))
    truth = sample.get("ground_truth")
    shown = "" if truth is None else f"<h2>ground truth</h2><pre>{_safe(truth)}</pre>"
    reward = sample["reward"]
    return (
        f"<article><h2 class={_class(reward)}>{_safe(headline(sample))}</h2>"
        f"<details><summary>prompt</summary><pre>{_safe(sample['prompt'])}</pre>{shown}</details>"
        f"<pre>{_safe(sample['response'])}</pre><table>{rows}</table></article>"
    )


def _class(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else "high" if value > 0 else "low"


def _safe(value: Any) -> str:
    return html.escape(str(value))


def _cut(text: str, whole: bool) -> str:
    if whole or len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:g}"


def _span(first: int | None, last: int | None) -> str:
    return "" if first is None else str(first) if first == last else f"{first} to {last}"


def _mean(samples: Sequence[Sampled]) -> str:
    rewards = [one["reward"] for one in samples if one["reward"] is not None]
    return _number(sum(rewards) / len(rewards) if rewards else None)

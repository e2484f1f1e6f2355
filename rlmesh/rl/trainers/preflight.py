"""Checks of a run before any process starts: model, tokenizer, data, and rewards on row 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.errors import UsageError
from rlmesh.rl.data.loader import PromptLoader
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.rewards.scoring import Rewards, unscored
from rlmesh.rl.types import Episode, Failed, Turn

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["check"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip


def check(run: Run) -> None:
    """Check what the settings of a run name.

    Raises:
        UsageError: lists all faults, with the row where a row is at fault.
    """
    faults: list[str] = []

    def attempt(what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (UsageError, OSError, ValueError) as error:
            faults.append(f"{what}: {error}")
            return None

    tokenizer = attempt(f"model={run.model!r}", lambda: _tokenizer(run))
    if tokenizer is not None:
        data = attempt("data", lambda: run.dataset(tokenizer))
        if data is not None:
            attempt("data", lambda: PromptLoader(data, run.batch_size))
            faults.extend(_reward_faults(run, tokenizer, data[0]))
            faults.extend(unscored(run.scored, data))
        if run.validation is not None:
            attempt("validation", lambda: run.dataset(tokenizer, run.validation))
    if faults:
        raise UsageError("the run cannot start:\n  " + "\n  ".join(faults))


def _tokenizer(run: Run) -> Any:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(run.model)
    advice = "save one beside it, with tokenizer.save_pretrained(folder)"
    # transformers makes an empty tokenizer where a folder has none.
    if Path(run.model).is_dir() and not any((Path(run.model) / name).exists() for name in TOKENIZER_FILES):
        raise UsageError(f"the model has no tokenizer: its folder has none of {', '.join(TOKENIZER_FILES)}; {advice}")
    try:
        return run.tokenizer()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the model has no tokenizer that transformers can load ({type(error).__name__}): {advice}"
        ) from error


def _reward_faults(run: Run, tokenizer: Any, prompt: Any) -> Iterator[str]:
    """One sentence per reward that fails on row 0, with a response of one end token."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    turn = Turn(np.asarray([end], np.int32), "policy", np.zeros(1, np.float32), version_spans=((0, 0, 1),))
    episode = Episode((Turn.said(prompt.ids), turn))
    for reward in run.scored:
        if not reward.scores(prompt.row):
            continue
        if isinstance(reward, RewardModel):
            yield from (f"reward model {reward.name!r}: {fault}" for fault in reward.faults(tokenizer, prompt.row))
            continue
        scorer = Rewards([reward], tokenizer, workers=1)
        try:
            outcome = scorer.outcomes([scorer.response(episode)], [prompt.row])[0][reward.name]
        except UsageError as error:
            yield f"reward {reward.name!r} on row 0: {error}"
            continue
        finally:
            scorer.close()
        if isinstance(outcome, Failed):
            yield f"reward {reward.name!r} fails on row 0 with a response of one token: {outcome.reason}"

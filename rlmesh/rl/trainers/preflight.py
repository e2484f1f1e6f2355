"""Checks of a run before any process starts: model, tokenizer, data, and rewards on row 0."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError
from rlmesh.rl.data.dataset import require_prompt
from rlmesh.rl.data.files import expand, read_rows
from rlmesh.rl.faults import similar_path
from rlmesh.rl.rewards.reward import Reward

if TYPE_CHECKING:
    from rlmesh.rl.data.dataset import Prompt
    from rlmesh.rl.rewards.model import RewardModel
    from rlmesh.rl.trainers.run import Run

__all__ = ["QUICK", "check", "quick_faults"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip
QUICK = ("model", "data", "validation", "batch_size", "max_prompt_tokens", "prompt_key")
"""The settings that `quick_faults` looks at."""
READ_PROMPTS = {"prompt", "prompts", "sample", "samples"}
"""The inputs of a reward function that contain the text of the prompt."""
READ_BYTES = 32 * 2**20
"""Data files up to this size are read before the tokenizer is loaded."""


def check(run: Run) -> str:
    """Check the model, the data and the rewards of a run.

    Checks that need neither torch nor transformers come first, since importing these takes seconds. The tokenizer's own
    file is enough to try the rewards on row 0.

    Returns:
        a text for people with the numbers of rows.

    Raises:
        UsageError: lists all faults, with the row where a row is at fault.
    """
    # A spawned process imports the script of its parent: without a guard, the script comes here again.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        from rlmesh.rl.rewards.process_pool import GUARD

        sys.exit(f"the script begins a run while a process that scores imports it: {GUARD}")
    twice = [*_names_that_occur_twice(run.scored)]
    faults = [*quick_faults(**{name: getattr(run, name) for name in QUICK}), *twice]
    tried, counts = set[str](), list[str]()
    if not twice:
        faults += _early_reward_faults(run, tried)
    if run.restore is not None or run.restore_parts != ("weights",):
        from rlmesh.rl.checkpoints.restoring import restore_faults  # loads torch

        faults += restore_faults(run)
    if run.algorithm.responses == "sampled" and run.rollout.engine.startswith("vllm") and not _is_installed("vllm"):
        faults.append(f"rollout.engine={run.rollout.engine!r} needs vllm: pip install 'rlmesh[vllm]'")
    if not faults:
        faults = [*_slow_faults(run, counts, tried)]
    if faults:
        raise UsageError("the run cannot start:\n  " + "\n  ".join(faults))
    return "; ".join(counts)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # The module is there, and was made by hand.
        return True


def quick_faults(
    model: Any = None, data: Any = None, validation: Any = None, batch_size: Any = 1, max_prompt_tokens: Any = None,
    prompt_key: Any = "prompt",
) -> Iterator[str]:  # fmt: skip
    """One sentence per fault of the model's folder and the data that can be found without torch and transformers.

    The arguments are settings of `Run`. Values of a wrong type are skipped, since other checks report them.
    """
    if isinstance(model, str):
        yield from (f"model={model!r}: {fault}" for fault in _model_faults(model))
    for name, rows in (("data", data), ("validation", validation)):
        if isinstance(rows, (str, Path, list, tuple)) and rows:
            least = batch_size if name == "data" and isinstance(batch_size, int) else 1
            longest = max_prompt_tokens if isinstance(max_prompt_tokens, int) else None
            key = prompt_key if isinstance(prompt_key, str) else "prompt"
            yield from (f"{name}: {fault}" for fault in _data_faults(rows, least, model, longest, key))


def _model_faults(model: str) -> Iterator[str]:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            near = similar_path(folder)
            yield f"there is no folder {folder}{near}"
        return
    if not (folder / "config.json").is_file():
        yield "the folder has no config.json: it is no model that transformers can load"
    elif not any(one.suffix in (".safetensors", ".bin") for one in folder.iterdir()):
        yield "the folder has no weights: no file *.safetensors or *.bin"
    # This check is needed because transformers makes an empty tokenizer if a folder has none.
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield (
            f"the model has no tokenizer: its folder has none of {', '.join(TOKENIZER_FILES)}; save one beside it, "
            "with tokenizer.save_pretrained(folder)"
        )


def _rows(data: Any) -> list[Any]:
    """The rows of data. None of them if files are large, or need a package that is missing.

    Raises:
        UsageError: a file cannot be read.
    """
    if not isinstance(data, (str, Path)) and isinstance(data[0], Mapping):
        return list(data)
    files = expand(data)
    if sum(path.stat().st_size for path in files) > READ_BYTES:
        return []
    try:
        return [*read_rows(files)]
    except ImportError:  # reported later, when the data set is made
        return []


def _data_faults(data: Any, least: int, model: Any, longest: int | None, key: str) -> Iterator[str]:
    try:
        rows = _rows(data)
    except (UsageError, OSError) as error:
        yield str(error)
        return
    if not rows:
        return
    try:
        require_prompt(rows[0], key, "the data")
    except UsageError as error:
        yield str(error)
    if len(rows) < least:
        yield (
            f"{len(rows)} prompts are too few for a batch of {least}: a step would take one twice. Give more data, or "
            "a smaller batch_size"
        )
    if isinstance(rows[0].get(key), list) and isinstance(model, str) and _has_no_template(Path(model)):
        yield (
            f"the prompts are chat messages, but the tokenizer in {model} has no chat template: use an instruct model, "
            "set tokenizer.chat_template and save it, or give the prompts as text"
        )
    if longest is not None and isinstance(model, str) and _all_too_long(rows, Path(model), longest, key):
        yield (
            f"there is no usable row: {len(rows)} rows read, {len(rows)} too long. A prompt may have "
            f"max_prompt_tokens={longest}"
        )


class _TokenizerFile:
    """The tokenizer of a folder's ``tokenizer.json``, without torch and transformers.

    Raises:
        OSError: the folder has no such file, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = folder / "tokenizer_config.json"
            named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
        except Exception as error:  # tokenizers raises no other class
            raise OSError(f"{folder}: {error}") from error
        end = named.get("content") if isinstance(named, dict) else named
        self.eos_token_id = self._tokenizer.token_to_id(end) if end else None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens.

        Raises:
            ValueError: the text has a character that the tokenizer cannot encode.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # tokenizers raises no other class
            raise ValueError(str(error)) from error

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _all_too_long(rows: Sequence[Any], folder: Path, longest: int, key: str) -> bool:
    """True if every row's prompt contains a text that alone exceeds the limit of a prompt."""
    try:
        tokenizer = _TokenizerFile(folder)
        for row in rows:
            prompt = row.get(key)
            texts = [prompt] if isinstance(prompt, str) else [part.get("content") for part in prompt or () if part]
            found = [len(tokenizer.encode(text)) for text in texts if isinstance(text, str)]
            if max(found, default=0) <= longest:
                return False
    except (OSError, ValueError):  # reported later, when transformers loads and uses it
        return False
    return bool(rows)


def _early_reward_faults(run: Run, tried: set[str]) -> Iterator[str]:
    """One sentence per reward function that fails on row 0; the names of the functions that were tried are added to
    ``tried``.

    Functions are tried if row 0 is at hand and the tokenizer has its own file. If row 0 has chat messages, functions
    that read the prompt are left out: the prompt needs the chat template.
    """
    import numpy as np

    from rlmesh.rl.data.dataset import Prompt

    try:
        row = _rows(next(iter(run.data)) if isinstance(run.data, Mapping) else run.data)[0]
        prompt, tokenizer = row.get(run.prompt_key), _TokenizerFile(Path(run.model).expanduser())
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else []
    except (UsageError, OSError, ValueError, LookupError, StopIteration, TypeError, ImportError):
        return  # another check reports it
    functions = [
        one for one in run.scored if isinstance(one, Reward) and (ids or READ_PROMPTS.isdisjoint(one.wanted()))
    ]
    tried.update(one.name for one in functions)
    yield from _function_faults(
        functions, tokenizer, Prompt(np.asarray(ids or [0], np.int32), row, 0), _extras(run, row)
    )


def _has_no_template(folder: Path) -> bool:
    """True if a folder's tokenizer certainly has no chat template."""
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or any(folder.glob("*chat_template*")) or (folder / "additional_chat_templates").exists():
        return False
    return '"chat_template"' not in settings.read_text(encoding="utf-8")


def _names_that_occur_twice(rewards: Sequence[Reward | RewardModel]) -> Iterator[str]:
    names = [reward.name for reward in rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"rewards: {names.count(name)} are named {name!r}; give each a name of its own"


def _slow_faults(run: Run, counts: list[str], tried: set[str]) -> Iterator[str]:
    """One sentence per fault whose check needs the tokenizer; a text on the numbers of rows is added to ``counts``.

    Rewards in ``tried`` are not tried again."""
    from rlmesh.rl.data.loader import PromptLoader
    from rlmesh.rl.offline.responses import response_texts
    from rlmesh.rl.rewards.scoring import lacking, unscored
    from rlmesh.rl.rollout.episodes.plan import EpisodePlan

    try:
        tokenizer = _tokenizer(run)
    except (UsageError, OSError, ValueError) as error:
        folder = Path(run.model).expanduser()
        near = similar_path(folder) if folder.parent.is_dir() else ""
        here = "" if folder.is_dir() else f"there is no folder of this name{near or '.'} As a hub name: "
        yield f"model={run.model!r}: {here}{error}"
        return
    yield from _token_faults(run, tokenizer)
    yield from _pack_faults(run)
    try:
        data = run.dataset(tokenizer)
        counts.append(f"data: {data.counts}")
        yield from _end_faults(run, tokenizer, data[0])
        if run.algorithm.responses != "sampled":
            for place in range(len(data)):
                response_texts(data[place].row, run.algorithm.responses)
        faults = [
            *_function_faults(
                [one for one in run.scored if one.name not in tried], tokenizer, data[0], _extras(run, data[0].row)
            )
        ]
        yield from faults or lacking(run.scored, data, "data")
        for model in run.reward_models:
            if model.scores(data[0].row):
                wrong = model.faults(tokenizer, data[0].row, run.prompt_key)
                yield from (f"reward model {model.name!r}: {fault}" for fault in wrong)
        yield from unscored(run.scored, data) if run.scored else ()
        PromptLoader(data, run.batch_size)
        longest = 0
        if run.algorithm.responses == "sampled" and run.agent is None:
            longest = max(len(data[place].ids) for place in range(len(data)))
        if (plan := EpisodePlan.of(run)) is not None:
            yield from plan.slow_faults(tokenizer, data[0].row)
            yield from plan.length_faults(longest, _positions(run.model))
            yield from _window_faults(run, "episode.max_tokens", plan.settings.max_tokens, longest)
        elif run.algorithm.responses == "sampled":
            yield from _sampling_faults(run, tokenizer, longest)
            yield from _window_faults(run, "rollout.max_tokens", run.rollout.max_tokens, longest)
    except (UsageError, OSError, ValueError) as error:
        yield f"data: {error}"
    if run.validation is not None:
        try:
            held_out = run.dataset(tokenizer, run.validation)
            counts.append(f"validation: {held_out.counts}")
            yield from lacking(run.scored, held_out, "validation")
        except (UsageError, OSError, ValueError) as error:
            yield f"validation: {error}"


def _sampling_faults(run: Run, tokenizer: Any, longest: int) -> Iterator[str]:
    """One sentence per limit of a response that the model cannot keep; ``longest``: tokens of the longest prompt."""
    positions, most = _positions(run.model), run.rollout.max_tokens
    if positions is not None and longest + most > positions:
        yield (
            f"rollout.max_tokens={most} after a prompt of {longest} tokens are more than the {positions} positions of "
            "the model: lower it, or max_prompt_tokens"
        )
    if beyond := [one for one in run.rollout.stop_token_ids if one >= len(tokenizer)]:
        yield f"rollout.stop_token_ids has {beyond[0]}, and the tokenizer has only {len(tokenizer)} tokens"


def _positions(model: str) -> int | None:
    """The longest text of the model, in tokens; None: unknown."""
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _window_faults(run: Run, setting: str, most: int, longest: int) -> Iterator[str]:
    """A fault if an episode can be longer than the window of tokens that the model's layers attend to, or than its
    positions are before they are rescaled.

    Args:
        setting, most: name and value of the limit of an episode's tokens after its prompt.
        longest: tokens of the longest prompt.
    """
    from transformers import AutoConfig

    from rlmesh.rl.engines.training.pack_check import rescaled_beyond, window_of

    if not run.trains:
        return
    config = AutoConfig.from_pretrained(run.model)
    limit = rescaled_beyond(config)
    if limit is not None and longest + most > limit:
        yield (
            f"{setting}={most} after a prompt of {longest} tokens are more than the {limit} tokens beyond which the "
            "model rescales its positions, which training does not support yet: lower it"
        )
    window = window_of(config)
    if window is not None and longest + most > window:
        yield (
            f"{setting}={most} after a prompt of {longest} tokens are more than the sliding window of {window} tokens "
            "that the model's layers attend to, which training does not support yet: lower it"
        )


def _pack_faults(run: Run) -> Iterator[str]:
    """One sentence per model that certainly gives wrong results on packs. The models themselves show the rest."""
    from transformers import AutoConfig

    from rlmesh.rl.engines.training.pack_check import static_fault

    models = {"model": run.model}
    if "reference" in run.algorithm.needs and run.reference.model:
        models["reference.model"] = run.reference.model
    if "critic" in run.algorithm.needs and run.critic.model:
        models["critic.model"] = run.critic.model
    for name, model in models.items() if run.trains else ():
        try:
            fault = static_fault(AutoConfig.from_pretrained(model))
        except (OSError, ValueError):  # loading the model reports it
            continue
        if fault:
            yield f"{name}={model!r} {fault}: a run computes its batches as packs"


def _token_faults(run: Run, tokenizer: Any) -> Iterator[str]:
    """One sentence per model that reads the tokens of the policy, and has a tokenizer with others: its numbers would
    belong to other texts."""
    from transformers import AutoTokenizer

    for role, model in (("reference", run.reference.model), ("critic", run.critic.model)):
        if model is None or role not in run.algorithm.needs:
            continue
        folder = Path(model).expanduser()
        if role == "critic" and folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
            continue  # a critic needs weights alone
        try:
            own, other = tokenizer.get_vocab(), AutoTokenizer.from_pretrained(model).get_vocab()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            yield f"{role}.model={model!r}: {error}"
            continue
        # A critic samples nothing, so further tokens of its own, such as one for padding, do no harm.
        if own != other if role == "reference" else not own.items() <= other.items():
            yield f"{role}.model={model!r} has other tokens than model={run.model!r}: both must have the same tokenizer"


def _end_faults(run: Run, tokenizer: Any, prompt: Prompt) -> Iterator[str]:
    """Faults of end tokens: the tokenizer appends its own to prompts, or no response would end with it."""
    end = tokenizer.eos_token_id
    if end is None or run.algorithm.responses == "ranked":
        return
    text = prompt.row.get(run.prompt_key)
    if isinstance(text, str) and prompt.ids[-1] == end and not text.endswith(tokenizer.eos_token):
        yield (
            f"model={run.model!r}: its tokenizer appends its end token {tokenizer.eos_token!r} to prompts, so they end "
            "before the response begins: set add_eos_token to false in tokenizer_config.json, or remove the token from "
            "the post_processor of tokenizer.json"
        )
    if run.algorithm.responses != "sampled" or end in run.rollout.stop_token_ids:
        return
    ends = _end_tokens(run.model)
    if end not in ends:
        yield (
            f"model={run.model!r}: its tokenizer's end token {tokenizer.eos_token!r} ({end}) is none of the end tokens "
            f"in its generation_config.json or config.json ({', '.join(map(str, ends)) or 'there are none'}), so no "
            f"response would end with it: set rollout.stop_token_ids=[{end}]"
        )


def _end_tokens(model: str) -> list[int]:
    """The tokens with which the engines end responses."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the folder may have no generation config
        ends = None
    if ends is None:
        ends = getattr(AutoConfig.from_pretrained(model).get_text_config(), "eos_token_id", None)
    return list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [ends]


def _tokenizer(run: Run) -> Any:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(run.model)
    try:
        return run.tokenizer()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the model has no tokenizer that transformers can load ({type(error).__name__}): save one beside it, with "
            "tokenizer.save_pretrained(folder)"
        ) from error


def _extras(run: Run, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Example extras of an episode, which rewards may read."""
    from rlmesh.rl.rollout.episodes.plan import EpisodePlan

    plan = EpisodePlan.of(run)
    return {} if plan is None else plan.extras_of(row)


def _function_faults(
    rewards: Sequence[Reward | RewardModel], tokenizer: Any, prompt: Any, extras: Mapping[str, Any]
) -> Iterator[str]:
    """One sentence per reward function that fails on row 0, with a response of one end token."""
    import numpy as np

    from rlmesh.rl.rewards.scoring import Rewards
    from rlmesh.rl.types import Episode, Failed, Turn

    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    turn = Turn(np.asarray([end], np.int32), "policy", np.zeros(1, np.float32), version_spans=((0, 0, 1),))
    episode = Episode((Turn.said(prompt.ids), turn), extras=dict(extras))
    functions = [one for one in rewards if isinstance(one, Reward) and one.scores(prompt.row)]
    if not functions:
        return
    response = Rewards(functions, tokenizer).response(episode)
    callable_ones = []
    for reward in functions:
        try:
            reward.arguments([response], [prompt.row])
            callable_ones.append(reward)
        except UsageError as error:
            yield f"reward {reward.name!r} on row 0: {error}"
    if not callable_ones:
        return
    scorer = Rewards(callable_ones, tokenizer, workers=1)
    try:
        found = scorer.outcomes([response], [prompt.row])[0]
    finally:
        scorer.close()
    for name, outcome in found.items():
        if isinstance(outcome, Failed):
            yield f"reward {name!r} fails on row 0 with a response of one token: {outcome.reason}"

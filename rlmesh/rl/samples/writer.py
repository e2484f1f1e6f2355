"""`SampleWriter`: writes the samples of steps as Parquet files, on a thread of its own."""

from __future__ import annotations

import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.rl.evaluation.settings import SampleSettings
from rlmesh.rl.samples.columns import SampledStep, columns_of
from rlmesh.rl.samples.files import FOLDER, file_name, sample_files
from rlmesh.rl.types import Episode, Group, Outcome

__all__ = ["SampleWriter"]

logger = logging.getLogger(__name__)

MOST_TOKENS = 16_000_000
"""The most tokens of samples that wait for the disk; beyond it, the oldest step is dropped and counted."""
CLOSE_S = 60.0
NAN = float("nan")


class SampleWriter:
    """Writes samples to the folder ``samples`` of a run: one file per step and split, private like all files of a run.

    `add` never waits for the disk. A step that is repeated after a restart replaces its file. A disk error never stops
    the training: the first one is logged, and each further step tries again.

    Args:
        run_dir: the run directory.
        settings: which steps are kept.
        decode: function from token ids to text.

    Attributes:
        lost: number of steps whose samples were dropped or could not be written.
    """

    def __init__(self, run_dir: Path, settings: SampleSettings, decode: Callable[[Sequence[int]], str]) -> None:
        self._folder, self._settings, self._decode = run_dir / FOLDER, settings, decode
        self._waiting: deque[SampledStep] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = self._warned = False
        self.lost = 0
        if settings.every and find_spec("pyarrow") is None:
            logger.warning("samples are not kept, since pyarrow is not installed: pip install 'rlmesh[data]'")
            self._settings = SampleSettings(every=0)

    def add(
        self,
        step: int,
        groups: Sequence[Group],
        total: Callable[[Episode], Outcome],
        *,
        split: str = "train",
        advantages: Mapping[int, float] | None = None,
    ) -> None:
        """Keep the samples of a step, if the settings say so.

        Args:
            step: the step.
            groups: the groups with outcomes.
            total: function that gives the reward of an episode.
            split: ``train`` or ``validation``.
            advantages: by ``id(episode)``; episodes without one were not trained on.
        """
        every = self._settings.every
        if not every or (split == "train" and step % every):
            return
        episodes, known = Group.episodes_of(groups), advantages or {}
        batch = SampledStep(
            step, split, tuple(groups), tuple(map(total, episodes)), tuple(known.get(id(one), NAN) for one in episodes)
        )
        with self._changed:
            while self._waiting and sum(map(_tokens, [*self._waiting, batch])) > MOST_TOKENS:
                self._waiting.popleft()
                self._lose("the disk is slower than the training, so that samples of a step were dropped")
            self._waiting.append(batch)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
                self._thread.start()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write the samples that wait, for at most ``within_s`` seconds. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within_s)
        if self.lost:
            logger.warning("the samples of %d steps are missing in %s", self.lost, self._folder)
            self.lost = 0

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait(60.0)
                if not self._waiting:
                    return
                batch = self._waiting.popleft()
            try:
                write(self._folder, batch, self._decode)
                thin(self._folder, self._settings.most_mib << 20)
            except Exception as error:  # disk, tokenizer and pyarrow may raise anything
                with self._changed:
                    self._lose(f"samples of step {batch.step} could not be written ({type(error).__name__}: {error})")

    def _lose(self, why: str) -> None:
        self.lost += 1
        if not self._warned:
            self._warned = True
            logger.warning("%s; the training goes on, and further losses are only counted", why)


def _tokens(batch: SampledStep) -> int:
    return sum(len(episode) for group in batch.groups for episode in group.episodes)


def write(folder: Path, batch: SampledStep, decode: Callable[[Sequence[int]], str]) -> None:
    """Write the samples of a step as one file.

    Raises:
        OSError: the file cannot be written, or others may write to the folder.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = columns_of(batch, decode)
    table = pa.table({name: pa.array(values, type=_kind(pa, name)) for name, values in columns.items()})
    held = io.BytesIO()
    pq.write_table(table, held, compression="zstd")
    private_files.make_folder(folder)
    private_files.write_whole(folder / file_name(batch.split, batch.step), held.getvalue(), durable=False)


def thin(folder: Path, most_bytes: int) -> None:
    """Remove the samples of every second step, oldest first, until the files have the allowed size. The newest step of
    each split stays."""
    files = sample_files(folder.parent)
    sizes = {one.path: one.path.stat().st_size for one in files}
    while sum(sizes.values()) > most_bytes:
        removed = False
        for split in ("train", "validation"):
            own = [one for one in files if one.split == split and one.path in sizes]
            for one in own[1:-1:2]:
                one.path.unlink(missing_ok=True)
                del sizes[one.path]
                removed = True
        if not removed:
            return


_TEXTS = {
    "split", "data_source", "prompt", "response", "ground_truth", "finish_reason", "versions", "said", "answer",
}  # fmt: skip
_WHOLE = {"step", "epoch", "index", "sample", "tokens", "first_version", "last_version"}
_LISTS = {"prompt_ids": "int32", "response_ids": "int32", "response_mask": "bool_", "log_probs": "float32"}


def _kind(pa: Any, name: str) -> Any:
    """The type of a column. It does not depend on the values, so all files of a run have the same types."""
    if name in _LISTS:
        return pa.list_(getattr(pa, _LISTS[name])())
    if name in _WHOLE:
        return pa.int64()
    return pa.string() if name in _TEXTS or (name.startswith("reward/") and name.endswith("/said")) else pa.float64()

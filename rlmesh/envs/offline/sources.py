"""Reads recorded steps from batches, files, recordings and Minari's data sets."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.offline.batch_files import read_batch
from rlmesh.envs.offline.recorded_steps import RecordedPart
from rlmesh.errors import UsageError, import_fault

if TYPE_CHECKING:
    from rlmesh.envs.environments.observations import ObservationRows

__all__ = ["parts_of", "source_problem"]

MINARI = "minari:"
READ = {".npz", ".json"}


def source_problem(given: Any) -> str | None:
    """The fault of a value of ``input_`` that can be seen without reading it; None if there is none."""
    sources = list(given) if isinstance(given, list | tuple) else [given]
    if not sources:
        return "input_: name at least one source"
    for source in sources:
        if isinstance(source, SampleBatch) or hasattr(source, "iterate_episodes"):
            continue
        if not isinstance(source, str | Path):
            return f"input_: a file, folder, pattern, SampleBatch or Minari data set, not {type(source).__name__}"
        if str(source).startswith(MINARI):
            try:
                import minari as minari
            except Exception as error:  # a broken installation may raise anything
                return f"input_={str(source)!r}: {import_fault('minari', error, 'rlmesh[minari]')}"
            continue
        try:
            files_of(source)
        except UsageError as error:
            return str(error)
    return None


def files_of(source: str | Path) -> list[Path]:
    """The files of a path, a folder, or a pattern, in the order of their names."""
    path = Path(source)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in READ and not each.name.startswith("."))
    elif path.is_file():
        found = [path]
    else:
        found = [Path(each) for each in sorted(glob.glob(str(source), recursive=True))]
    if not found:
        raise UsageError(f"input_: {source} has no files that end with .npz or .json")
    wrong = next((each for each in found if each.suffix not in READ), None)
    if wrong is not None:
        raise UsageError(f"input_: {wrong} is neither a batch (.npz) nor a recorded episode (.json)")
    return found


def parts_of(given: Any, rows: ObservationRows, make: Callable[[], Any]) -> Iterator[RecordedPart]:
    """The episodes of the value of ``input_``.

    Args:
        given: see `rlmesh.envs.offline`.
        rows: the form of observations that the policy takes.
        make: makes the environment, in which recordings are played again.

    Raises:
        UsageError: a source cannot be read, or an episode plays differently today.
    """
    for source in given if isinstance(given, list | tuple) else [given]:
        if isinstance(source, SampleBatch):
            yield from of_batch(source, "a batch of input_", rows)
        elif hasattr(source, "iterate_episodes"):
            yield from of_minari(source, rows)
        elif str(source).startswith(MINARI):
            yield from of_minari(_minari_of(str(source).removeprefix(MINARI)), rows)
        else:
            for path in files_of(source):
                if path.suffix == ".npz":
                    yield from of_batch(read_batch(path), str(path), rows)
                else:
                    yield of_recording(path, rows, make)


def of_batch(batch: SampleBatch, source: str, rows: ObservationRows) -> Iterator[RecordedPart]:
    """The episodes of a batch, and the parts of those that it has not whole."""
    needed = (columns.OBS, columns.ACTIONS, columns.REWARDS, columns.TERMINATEDS, columns.TRUNCATEDS)
    lacks = [name for name in needed if name not in batch]
    if lacks:
        raise UsageError(f"{source}: there is no column {lacks[0]!r}; it has {', '.join(batch)}")
    done = batch[columns.DONES]
    starts = np.ones(len(batch), bool)
    starts[1:] = done[:-1]
    if columns.EPS_ID in batch:
        starts[1:] |= batch[columns.EPS_ID][1:] != batch[columns.EPS_ID][:-1]
    if columns.T in batch:
        starts[1:] |= batch[columns.T][1:] != batch[columns.T][:-1] + 1
    bounds = [*np.flatnonzero(starts).tolist(), len(batch)]
    for number, (start, end) in enumerate(pairwise(bounds)):
        episode = batch[start:end]
        observations = as_rows(episode[columns.OBS], rows)
        if columns.NEW_OBS in batch:
            last = as_rows(episode[end - start - 1 :][columns.NEW_OBS], rows)
            observations = np.concatenate([observations, last])
        yield RecordedPart(
            f"{source}, episode {number}", observations, episode[columns.ACTIONS], episode[columns.REWARDS],
            bool(episode[columns.TERMINATEDS][-1]),
        )  # fmt: skip


def of_recording(path: Path, rows: ObservationRows, make: Callable[[], Any]) -> RecordedPart:
    """The episode of a file of ``rlmesh env record``, played again: the file has actions, but no observations."""
    from rlmesh.envs.checks.recordings import EpisodeRecording

    observations: list[np.ndarray] = []
    rewards: list[float] = []
    recording = EpisodeRecording.load(path)

    def seen(observation: Any, reward: float | None) -> None:
        row = rows.empty(1)
        rows.write(row, 0, observation)
        observations.append(row[0])
        if reward is not None:
            rewards.append(float(reward))

    made = make()
    actions = made.action_space.from_jsonable(recording.actions)
    made.close()
    if (difference := recording.replay(make, seen=seen)) is not None:
        raise UsageError(f"{path}: the environment plays this episode differently today: {difference}")
    return RecordedPart(
        str(path), np.stack(observations), np.stack(actions), np.array(rewards), recording.ended == "terminated"
    )


def of_minari(dataset: Any, rows: ObservationRows) -> Iterator[RecordedPart]:
    """The episodes of a data set of Minari, whose observations are ``[steps + 1, …]``."""
    name = getattr(getattr(dataset, "spec", None), "dataset_id", "a data set of Minari")
    for episode in dataset.iterate_episodes():
        terminated = bool(np.asarray(episode.terminations)[-1]) if len(episode.terminations) else False
        yield RecordedPart(
            f"{name}, episode {episode.id}", as_rows(episode.observations, rows), np.asarray(episode.actions),
            np.asarray(episode.rewards), terminated,
        )  # fmt: skip


def _minari_of(name: str) -> Any:
    import minari

    try:
        return minari.load_dataset(name)
    except (FileNotFoundError, ValueError, KeyError) as error:
        known = ", ".join(sorted(minari.list_local_datasets())) or "none"
        raise UsageError(
            f"input_: Minari has no local data set {name!r} ({error}); there are: {known}. Download it with "
            f"`minari download {name}`"
        ) from error


def as_rows(observations: Any, rows: ObservationRows) -> np.ndarray:
    """Observations ``[steps, …]``, dicts and tuples of arrays too, as rows."""
    if not rows.flattens or (isinstance(observations, np.ndarray) and observations.shape[1:] == rows.shape):
        return np.asarray(observations)
    from gymnasium.spaces.utils import flatten

    steps: list[Any] = [flatten(rows.given, _at(observations, i)) for i in range(_length(observations))]
    return np.stack(steps).astype(rows.dtype)


def _at(tree: Any, index: int) -> Any:
    if isinstance(tree, dict):
        return {name: _at(each, index) for name, each in tree.items()}
    return tuple(_at(each, index) for each in tree) if isinstance(tree, tuple) else tree[index]


def _length(tree: Any) -> int:
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
    return len(tree)

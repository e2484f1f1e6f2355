"""`evaluate`: a model or a checkpoint on a data set, without training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.protocol import Algorithm
from rlmesh.rl.checkpoints.store import checkpoint_folder, read_checkpoint, saved_step
from rlmesh.rl.evaluation.settings import SampleSettings
from rlmesh.rl.trainers.job import build
from rlmesh.rl.trainers.progress import finished_steps
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import LoraSettings

__all__ = ["EvaluationResult", "EvaluationRun", "evaluate", "evaluation_of", "of_run_directory"]

RESULT_FILE = "evaluation.json"


@dataclass(frozen=True)
class EvaluationRun(Run):
    """The settings of an evaluation: a run that answers its validation prompts once.

    Attributes:
        checkpoint: the folder of the actor's checkpoint; ``None``: the weights of ``model``.
    """

    checkpoint: str | None = None

    @property
    def trains(self) -> bool:
        return False


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        run_dir: the run directory of the evaluation, with the samples.
        metrics: the metrics by name.
    """

    run_dir: Path
    metrics: Mapping[str, float]


def of_run_directory(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """The weights of a run, as arguments of `evaluate`.

    Args:
        run_dir: directory of a run that is in progress or has ended.
        step: the step of a checkpoint; ``None``: the trained model or, if the run has not ended, the last checkpoint.

    Raises:
        UsageError: there are no such weights (the message names those that exist), or the checkpoint is not complete.
    """
    model, latest = run_dir / "model", saved_step(run_dir)
    # A run that was resumed after its end has a model of fewer steps; a run that is just ending has a part of a model.
    if step is None and (ended := finished_steps(run_dir)) and ended >= latest and (model / "config.json").is_file():
        return {"model": str(model)}
    saved = latest if step is None else step
    folder = checkpoint_folder(run_dir, saved)
    if saved and folder.is_dir():
        return {"checkpoint": str(read_checkpoint(folder).require_part("actor").absolute())}
    steps = sorted(int(one.name.partition("-")[2]) for one in (run_dir / "checkpoints").glob("step-*"))
    there = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
    trained = " and a trained model" if model.is_dir() else ""
    asked = "no trained model" if step is None else f"no checkpoint of step {step}"
    raise UsageError(f"{run_dir} has {asked}; it has {there}{trained}")


def evaluate(
    run: Run,
    *,
    model: str | None = None,
    checkpoint: str | None = None,
    data: Any = None,
    name: str = "evaluation",
    **options: Any,
) -> EvaluationResult:
    """Answer the prompts of a data set with a model, and report the metrics of a validation.

    Args:
        run: settings; ``evaluation``, ``rewards`` and ``rollout`` say how to sample and score.
        model: a folder or hub name; ``None``: the run's model.
        checkpoint: the folder of an actor's checkpoint of that run; its weights replace those of the model.
        data: prompts; ``None``: the validation data of the run.
        name: name of the job.
        options: further arguments of `DLJob.submit`.

    Raises:
        UsageError: something is wrong with the settings; no process was started.
        JobFailed: the job failed; the error names the root cause.
    """
    task = evaluation_of(run, model=model, checkpoint=checkpoint, data=data)
    task.check()
    from rlmesh.rl.evaluation.roles import EvaluatedActor, Evaluator

    found = build(task, trainer=Evaluator, actor=EvaluatedActor).submit(name, **options)
    run_dir = Path(found.run_dir)
    return EvaluationResult(run_dir, json.loads(private_files.read(run_dir / RESULT_FILE)))


def evaluation_of(
    run: Run, *, model: str | None = None, checkpoint: str | None = None, data: Any = None
) -> EvaluationRun:
    """The settings of an evaluation, by the arguments of `evaluate`.

    Raises:
        UsageError: there are no prompts, or something is wrong with the settings.
    """
    prompts = run.validation if data is None else data
    if prompts is None:
        raise UsageError("there are no prompts: the run has no validation data; give --data FILE, or data= in Python")
    # A mixture of data sets is for training: an evaluation takes all prompts of all of them.
    prompts = list(prompts) if isinstance(prompts, Mapping) else prompts
    settings = {one.name: getattr(run, one.name) for one in dataclasses.fields(Run)}
    changed = {
        "model": run.model if model is None else model,
        "data": prompts, "validation": prompts, "batch_size": 1, "algorithm": Algorithm(),
        "placement": "auto" if run.placement == "fused" else run.placement,
        "pipeline": "sync", "resume": "auto", "restore": None, "keep_best": "",
        "sample_files": SampleSettings(most_mib=run.sample_files.most_mib),
        # These settings of training do not go with one prompt per batch, and one response per prompt. The number of
        # optimizer steps of a step stays, since the step of a checkpoint follows from it.
        "actor": dataclasses.replace(
            run.actor, epochs=run.actor.updates, minibatches=1,
            lora=LoraSettings() if checkpoint is None else run.actor.lora,
        ),
        "critic": dataclasses.replace(run.critic, minibatches=1),
        "rollout": dataclasses.replace(run.rollout, dynamic_sampling=False, oversampling=1.0),
    }  # fmt: skip
    return EvaluationRun(**{**settings, **changed}, checkpoint=checkpoint)

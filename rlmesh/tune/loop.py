"""`TrialLoop`: gives trials to slots, and follows each of them from step to step until it ends."""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmesh.envs import ResultDict
from rlmesh.errors import UsageError
from rlmesh.runtime.process import clock
from rlmesh.tune import analysis as states
from rlmesh.tune import trial as trials
from rlmesh.tune.analysis import ExperimentAnalysis, trial_folder
from rlmesh.tune.curves import CURVES
from rlmesh.tune.execution import Answer, TrialSlot
from rlmesh.tune.progress import result_line, say
from rlmesh.tune.search import Search
from rlmesh.tune.space import named
from rlmesh.tune.trial import Stop, Trial, TrialFiles

__all__ = ["TrialLoop"]

SAVE_S = 60.0
"""Longest wait for the checkpoints of trials that Ctrl-C ended."""


class _TimeOver(Exception):
    """The time budget is used up."""


@dataclass
class _RunningTrial:
    """The work of a slot: a trial, the step that was submitted last, and the state in which the trial ends."""

    trial: Trial
    step: str = "begin"
    end: str | None = None


@dataclass
class TrialLoop:
    """Carries out trials; `run` explains the settings.

    Attributes:
        found: the trials, whose states change.
        of_trial: gives class and settings of a trial for chosen values.
        threads: threads of torch for each trial in a process of its own; 0: trials run in this process.
        evaluates: some results have an evaluation.
        ends: time on `clock.now` at which all trials end; None: no limit.
    """

    found: ExperimentAnalysis
    search: Search
    of_trial: Callable[..., Any]
    stop: Stop
    checkpoint_freq: int
    checkpoint_at_end: bool
    max_failures: int
    verbose: int
    seed: int
    restore: str | None
    space: Mapping[str, str]
    threads: int
    evaluates: bool
    ends: float | None
    answers: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    _runs: dict[TrialSlot, _RunningTrial] = field(default_factory=dict)
    _files: dict[str, TrialFiles] = field(default_factory=dict)
    _values: dict[int, Mapping[Any, Any]] = field(default_factory=dict)

    def work(self, todo: deque[Trial], slots: Sequence[TrialSlot]) -> None:
        """Carry out all trials; return when the last one has ended, after Ctrl-C, or when the time is over."""
        free = deque(slots)
        self._save_state()
        try:
            while True:
                while free and todo:
                    slot, trial = free.popleft(), todo.popleft()
                    self._runs[slot] = _RunningTrial(trial)
                    try:
                        self._begin(slot, trial)
                    except UsageError as error:
                        if self.found.single:
                            raise
                        self._take(Answer(slot, error=str(error)), todo)
                if not self._runs:
                    return
                answer = self._next()
                self._take(answer, todo)
                if answer.slot not in self._runs:
                    free.append(answer.slot)
        except (KeyboardInterrupt, _TimeOver):
            self._interrupt()

    def close(self) -> None:
        """Close the files of trials that have not ended, and draw their curves."""
        while self._files:
            self._files.popitem()[1].close()

    def finish(self) -> None:
        """Draw the curves of a search, and print its table."""
        if self.found.single:
            return
        self._save_state()
        if self.found.experiment_path is not None:
            self.found.draw(self.found.experiment_path / CURVES)
        if self.verbose:
            say(str(self.found))

    def _begin(self, slot: TrialSlot, trial: Trial) -> None:
        number = int(trial.trial_id)
        if number not in self._values:
            self._values[number] = self.search.ask(number)
        trial.config = {named(path): value for path, value in self._values[number].items()}
        trial.status = trials.RUNNING
        restore = trial.checkpoint or self.restore
        files = self._files_of(trial)
        if not self.found.single:
            done = int(Path(trial.checkpoint).name) if trial.checkpoint else 0
            trial.history = [pair for pair in trial.history if pair[0] <= done]
            trial.last_result = ResultDict() if files is None else files.begin(done)
        elif files is not None and (restored := trials.iteration_of(files.folder, restore)) is not None:
            files.begin(restored)  # drops the results that this training computes again
        self.search.go_on(number, trial.history)
        self._save_state()
        slot.submit("begin", self.of_trial(self._values[number], pickled=self.threads > 0), restore, self.threads)

    def _next(self) -> Answer:
        if self.ends is None:
            return self.answers.get()
        left_s = self.ends - clock.now()
        try:
            if left_s <= 0:
                raise _TimeOver
            return self.answers.get(timeout=left_s)
        except queue.Empty:
            raise _TimeOver from None

    def _take(self, answer: Answer, todo: deque[Trial]) -> None:
        """Take the answer of a step and submit the next one; a slot whose trial has ended is no longer in ``_runs``."""
        slot = answer.slot
        run = self._runs[slot]
        trial = run.trial
        if run.step == "end":
            del self._runs[slot]
        elif answer.error is not None:
            self._failed(slot, run, answer, todo)
        elif run.step == "train":
            self._result(slot, run, ResultDict(answer.value))
        elif run.step == "save":
            trial.checkpoint = answer.value
            if run.end is None:  # otherwise the state is written when the trial ends
                self._save_state()
            self._go_on(slot, run)
        else:
            if self._is_over(trial):  # an earlier run was killed after the trial's last iteration
                run.end = trials.TERMINATED
            self._go_on(slot, run)

    def _submit(self, slot: TrialSlot, run: _RunningTrial, step: str, *args: Any) -> None:
        run.step = step
        slot.submit(step, *args)

    def _result(self, slot: TrialSlot, run: _RunningTrial, result: ResultDict) -> None:
        trial, files = run.trial, self._files_of(run.trial)
        value = self._record(trial, result)
        number, iteration = int(trial.trial_id), trial.iteration
        if self._is_over(trial):
            run.end = trials.TERMINATED
        elif self.search.report(number, iteration, value):
            run.end = trials.PRUNED
        due = self.checkpoint_freq and iteration % self.checkpoint_freq == 0
        if files is not None and (due or (run.end and self.checkpoint_at_end)):
            self._submit(slot, run, "save", str(files.checkpoint(iteration)))
        else:
            self._go_on(slot, run)

    def _is_over(self, trial: Trial) -> bool:
        return trials.is_over(trial.last_result, self.stop, evaluates=self.evaluates)

    def _record(self, trial: Trial, result: ResultDict) -> float:
        """Keep, write and print a result; return the value of the metric."""
        trial.last_result = result
        if self.verbose:
            say(result_line(trial, titled=not self.found.single))
        if (files := self._files_of(trial)) is not None:
            files.add(result)
        value = trials.metric_of(result, self.found.metric, "metric", evaluates=self.evaluates)
        if math.isfinite(value):
            trial.history.append((trial.iteration, value))
        return value

    def _go_on(self, slot: TrialSlot, run: _RunningTrial) -> None:
        if run.end is None:
            self._submit(slot, run, "train")
            return
        self._ended(run.trial, run.end)
        self._submit(slot, run, "end")

    def _ended(self, trial: Trial, status: str) -> None:
        trial.status = status
        value = trial.score("last", self.found.mode)
        self.search.tell(
            int(trial.trial_id), None if math.isnan(value) else value, pruned=status == trials.PRUNED,
            failed=status == trials.ERROR,
        )  # fmt: skip
        self._save_state()
        if status == trials.PRUNED and self.verbose:
            say(f"{trial.title}  pruned after {trial.iteration} iterations", style="dim")
        if (files := self._files.pop(trial.trial_id, None)) is not None:
            files.close()

    def _failed(self, slot: TrialSlot, run: _RunningTrial, answer: Answer, todo: deque[Trial]) -> None:
        trial = run.trial
        assert answer.error is not None
        trial.failures += 1
        trial.error = answer.error
        again = trial.failures <= self.max_failures
        last = answer.error.strip().rpartition("\n")[2]
        say(f"{trial.title}  {'failed, and begins again' if again else 'failed'}: {last}", style="red")
        if again:
            trial.status = trials.PENDING
            todo.append(trial)
        else:
            self._ended(trial, trials.ERROR)
        self._submit(slot, run, "end")

    def _interrupt(self) -> None:
        """Mark the running trials as stopped, and write their checkpoints if these were asked for."""
        self.found.interrupted = True
        saving: dict[TrialSlot, _RunningTrial] = {}
        arrived: dict[TrialSlot, Answer] = {}
        while not self.answers.empty():
            answer = self.answers.get()
            arrived[answer.slot] = answer
        for slot, run in self._runs.items():
            if run.trial.status != trials.RUNNING:
                continue
            run.trial.status = trials.STOPPED
            known = arrived.get(slot)
            if known is not None and not self._arrived(run, known):
                continue
            if not self.checkpoint_at_end or self.found.experiment_path is None:
                if run.end is not None:
                    self._ended(run.trial, run.end)
                continue
            saving[slot] = run
            # A trial in another process is within an iteration, whose result comes first.
            if known is not None or not (self.threads and run.step == "train"):
                self._save_stopped(slot, saving)
        until = clock.now() + SAVE_S
        while saving:
            try:
                answer = self.answers.get(timeout=max(0.0, until - clock.now()))
            except (queue.Empty, KeyboardInterrupt):
                names = ", ".join(run.trial.trial_id for run in saving.values())
                say(f"the checkpoints of these trials were not written in time: {names}", style="red")
                break
            if answer.slot not in saving:
                continue
            run = saving[answer.slot]
            if not self._arrived(run, answer):
                del saving[answer.slot]
            elif run.step == "save":
                del saving[answer.slot]
                if run.end is not None:
                    self._ended(run.trial, run.end)
            else:
                self._save_stopped(answer.slot, saving)

    def _arrived(self, run: _RunningTrial, answer: Answer) -> bool:
        """Keep what a trial did before it was stopped; False if it failed."""
        if answer.error is not None:
            what = "its checkpoint was not written" if run.step == "save" else "failed"
            say(f"{run.trial.title}  {what}: {answer.error.strip()}", style="red")
            return False
        if run.step == "save":
            run.trial.checkpoint = answer.value
        elif run.step == "train":
            self._record(run.trial, ResultDict(answer.value))
            if self._is_over(run.trial):
                run.end = trials.TERMINATED
        return True

    def _save_stopped(self, slot: TrialSlot, saving: dict[TrialSlot, _RunningTrial]) -> None:
        run, files = saving[slot], self._files_of(saving[slot].trial)
        number = run.trial.iteration
        if files is None or not number or run.trial.checkpoint == str(files.checkpoint(number)):
            del saving[slot]
            if run.end is not None:
                self._ended(run.trial, run.end)
        else:
            self._submit(slot, run, "save", str(files.checkpoint(number)))

    def _files_of(self, trial: Trial) -> TrialFiles | None:
        storage = self.found.experiment_path
        if storage is None:
            return None
        if trial.trial_id not in self._files:
            self._files[trial.trial_id] = TrialFiles(trial_folder(storage, trial, single=self.found.single))
        return self._files[trial.trial_id]

    def _save_state(self) -> None:
        if not self.found.single:
            states.save(self.found, self.space, self.seed, type(self.search).__name__)

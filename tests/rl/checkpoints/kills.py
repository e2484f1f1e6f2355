"""Kills whole runs at random moments, lets them go on, and compares all that they leave with undisturbed runs.

``python -m tests.rl.checkpoints.kills FOLDER --seed 0 --tries 50`` prints a line of JSON per try. A run is a process
group of its own, forked from this process, which has loaded torch already; all of it is killed at once, at a moment
in one of its steps or after the last; in every fifth try between its start and its end. In every third try it is
killed a second time while it goes on. Every second pair of tries saves at each step. The exit code is 1 if something
differs.

With ``--episodes`` the runs have a game or an agent, whose turns reach the engine when they will, so floats may differ
in the last digit. Then the ledger must say that each sample was trained once per epoch, in order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlmesh.rl.checkpoints.store import saved_step
from rlmesh.rl.trainers.run import Run
from tests.own_time import HANG_S
from tests.rl.checkpoints.runs import content, make, make_model, metrics_of
from tests.rl.turns import episode_runs

CHOICES = (("ppo", "sync"), ("grpo", "one-step-off"), ("ppo", "one-step-off"), ("grpo", "sync"))
"""Algorithms and pipelines."""
EPISODES = (("environment", "sync"), ("agent", "sync"), ("agent", "one-step-off"))
"""Partners of the policy, and pipelines."""


@dataclass(frozen=True)
class Kind:
    """What runs."""

    model: Path
    algorithm: str
    pipeline: str
    save_every: int = 2

    def make(self) -> Run:
        if (self.algorithm, self.pipeline) in EPISODES:
            return episode_runs.make(self.model, self.algorithm, pipeline=self.pipeline, save_every=self.save_every)
        return make(self.model, self.algorithm, pipeline=self.pipeline, save_every=self.save_every)

    def same(self, run_dir: Path, whole: Path) -> bool:
        """True if a run that was killed left what it should."""
        if (self.algorithm, self.pipeline) in EPISODES:
            if found := episode_runs.faults(run_dir, self.make()):
                print(found, file=sys.stderr)
            return not found and episode_runs.reported(run_dir).keys() == episode_runs.reported(whole).keys()
        return content(run_dir) == content(whole) and metrics_of(run_dir) == metrics_of(whole)


def start(kind: Kind, run_dir: Path) -> int:
    """The process of a run; the leader of its group."""
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(run_dir.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        kind.make().here(run_dir=run_dir)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, limit_s: float) -> int | None:
    """The exit code of a process; None if it runs after so many seconds, or was killed."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def finish(kind: Kind, run_dir: Path) -> None:
    code = ended(start(kind, run_dir), HANG_S)
    assert code == 0, f"the run in {run_dir} gave {code}:\n{run_dir.with_suffix('.log').read_text()[-4000:]}"


def reports_in(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def await_reports(pid: int, run_dir: Path, wanted: int) -> int | None:
    """Wait until a run has made so many reports; returns its exit code if it ends before."""
    until = time.monotonic() + HANG_S
    while reports_in(run_dir) < wanted and time.monotonic() < until:
        if (code := ended(pid, 0.002)) is not None:
            return code
    return None


def attempt(kind: Kind, run_dir: Path, moments: list[tuple[int, float]]) -> dict[str, Any]:
    """Kill a run at moments, given in reports after its start and seconds after these; then let it end."""
    killed = []
    for reports, moment in moments:
        before = reports_in(run_dir)
        pid = start(kind, run_dir)
        code = await_reports(pid, run_dir, before + reports)
        code = ended(pid, moment) if code is None else code
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        progress = run_dir / "progress.json"
        step = json.loads(progress.read_text())["step"] if progress.exists() else 0
        killed.append(
            {"reports": reports, "after_s": round(moment, 3), "step": step, "saved": saved_step(run_dir), "code": code}
        )
    finish(kind, run_dir)
    return {"algorithm": kind.algorithm, "pipeline": kind.pipeline, "save_every": kind.save_every, "killed": killed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--episodes", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = random.Random(options.seed)
    model = make_model(options.folder / "model")
    whole, took_s, step_s = {}, {}, {}
    choices = EPISODES if options.episodes else CHOICES
    for choice in choices[: max(1, options.tries)]:
        began = time.monotonic()
        run_dir = options.folder / "-".join(["whole", *choice])
        finish(Kind(model, *choice), run_dir)
        took_s[choice] = time.monotonic() - began
        at = [json.loads(line)["at"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        step_s[choice], whole[choice] = (at[-1] - at[0]) / (len(at) - 1), run_dir
    differing = 0
    for number in range(options.tries):
        choice = choices[number % len(choices)]
        run_dir = options.folder / f"try-{number}"
        moments = []
        for _ in range(2 if number % 3 == 2 else 1):
            reports = 0 if number % 5 == 4 else chosen.randint(1, 9)
            moments.append((reports, chosen.uniform(0, (step_s if reports else took_s)[choice])))
        kind = Kind(model, *choice, save_every=1 + number // 2 % 2)
        found = attempt(kind, run_dir, moments)
        same = kind.same(run_dir, whole[choice])
        differing += not same
        print(json.dumps({"try": number, "same": same, **found}), flush=True)
    print(json.dumps({"tries": options.tries, "differing": differing}), flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Seeded kills of the members of trainings, and what their ledgers say afterwards.

``python -m tests.rl.rollout.kills --kills 200 --seed 1`` runs small trainings, sync and async, with one and two engines
whose answer times differ tenfold, and kills drawn members (trainer, actor, engines) at drawn moments. Right is: the
training ends, and in the history that its ledger says survives, each sample is trained exactly once per epoch, none is
lost, no sample is staler than the bound, and steps are in order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.rl.trainers.progress import Progress
from tests.rl.rollout import kills_job

TARGETS = ("TRAINER", "ACTOR", "ROLLOUT")
MARK = "RLMESH_KILLS"
LATEST_S = 1.2
"""A kill comes up to this long after the run has made a step since the last kill."""
APART = 4
"""Steps between two kills of engines: then the first one's prompts are trained, with a staleness of 2. A prompt whose
engines die twice in a row, the second one with nothing else to sample, is set aside as it should be."""
STALLS_S = 60.0
"""A run that makes no step for so long has failed."""
WAYS = (("sync", 1), ("sync", 2), ("async(staleness=2)", 1), ("async(staleness=2)", 2), ("one-step-off", 2))


@dataclass(frozen=True)
class Outcome:
    """One training with kills.

    Attributes:
        killed: number of kills of each role.
        wrong: what is wrong with the result, one sentence each.
    """

    killed: dict[str, int]
    steps: int
    void: int
    wrong: list[str]
    output: str


@contextmanager
def training(
    folder: Path, model: Path, pipeline: str, engines: int, steps: int, poison: int = -1
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a training's driver, in a session of its own; at the end nothing of it runs any more."""
    env = {
        **os.environ, MARK: folder.name, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    launch = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", kills_job.__file__]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launch, str(model), pipeline, str(engines), str(steps), str(poison)], cwd=folder, env=env,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            for pid, _ in members(folder.name, ("",)):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def members(mark: str, names: tuple[str, ...] = TARGETS) -> list[tuple[int, str]]:
    """The members of a training that live: process and name."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if f"{MARK}={mark}\0".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                continue
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            alive = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            continue
        if name.startswith(names) and alive:
            found.append((pid, name))
    return sorted(found)


def killed_after_its_end(run_dir: Path) -> bool:
    """True if a member was killed when the training was over, and the job was about to end: that is a failure."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    kinds = [
        "killed" if event["event"] == "MemberExited" and event["exit"]["signal"] == signal.SIGKILL
        else (event["event"], event.get("who")) for event in events
    ]  # fmt: skip
    over = ("RunFinished", "TRAINER:0")
    return over in kinds and "killed" in kinds[kinds.index(over) :]


def attempt(folder: Path, model: Path, pipeline: str, engines: int, kills: int, seed: int, steps: int) -> Outcome:
    """Carry out one training, and judge it."""
    source = random.Random(f"{seed} {pipeline} {engines}")
    killed: Counter[str] = Counter()
    run_dir, wrong, engines_from = folder / "run", list[str](), 0
    with training(folder, model, pipeline, engines, steps) as process:
        seen, moved = -1, time.monotonic()
        while process.poll() is None:
            step = Progress.read(run_dir).step if run_dir.exists() else 0
            if step != seen:
                seen, moved = step, time.monotonic()
                if 0 < step < steps and killed.total() < kills:
                    # Sooner, if the training gets so far meanwhile that it might end before all kills.
                    due, most = (
                        time.monotonic() + source.uniform(0, LATEST_S),
                        steps * (killed.total() + 1) / (kills + 1),
                    )
                    while time.monotonic() < due and Progress.read(run_dir).step < most:
                        time.sleep(0.01)
                    role = source.choice(TARGETS if step >= engines_from else TARGETS[:2])
                    living = members(folder.name, (role,))
                    if living and process.poll() is None:
                        try:
                            os.kill(source.choice(living)[0], signal.SIGKILL)
                        except ProcessLookupError:
                            continue
                        killed[role] += 1
                        if role == "ROLLOUT":
                            engines_from = Progress.read(run_dir).step + APART
            if time.monotonic() - moved > STALLS_S:
                wrong.append(f"no step for {STALLS_S:g} s after step {step}")
                break
            time.sleep(0.02)
    output = (folder / "output").read_text(errors="replace")
    if not wrong and process.returncode and not killed_after_its_end(run_dir):
        wrong.append(f"the training failed with exit code {process.returncode}")
    void = 0
    if (run_dir / LEDGER).exists():
        wrong += faults_of(run_dir / LEDGER)
        rows = list(read_rows(run_dir / LEDGER, void=True))
        void = sum(row.void for row in rows)
        trained = [row for row in rows if row.state == "trained" and not row.void]
        if not wrong and len(trained) != steps * kills_job.BATCH:
            wrong.append(f"{len(trained)} groups are trained, not {steps * kills_job.BATCH}")
        wrong += [f"position {row.position} {row.state}: {row.reason}" for row in rows if row.state == "failed"]
        per_epoch = Counter(row.epoch for row in trained)
        whole = steps * kills_job.BATCH // kills_job.PROMPTS
        wrong += [f"epoch {e}: {per_epoch[e]} prompts" for e in range(whole) if per_epoch[e] != kills_job.PROMPTS]
    else:
        wrong.append("there is no ledger")
    return Outcome(dict(killed), steps, void, wrong, output if wrong else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of all trainings together")
    parser.add_argument("--each", type=int, default=10, help="kills per training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="pipelines that begin with this")
    parser.add_argument("--keep", default="", help="folder for what is left of trainings that went wrong")
    args = parser.parse_args()
    from tests.rl.conftest import make_tiny

    done, number, good = 0, 0, True
    ways = [way for way in WAYS if way[0].startswith(args.only)]
    with tempfile.TemporaryDirectory(prefix="rlk-") as base:
        model = Path(base) / "model"
        model.mkdir()
        make_tiny(model)
        while done < args.kills:
            pipeline, engines = ways[number % len(ways)]
            folder = Path(base) / f"{number}"
            folder.mkdir()
            began = time.monotonic()
            kills = min(args.each, args.kills - done)
            found = attempt(folder, model, pipeline, engines, kills, args.seed + number, steps=18 + 3 * kills)
            number, done, good = number + 1, done + sum(found.killed.values()), good and not found.wrong
            what = f"{number:3} {pipeline:19} {engines} engines: {found.killed}, {found.steps} steps"
            took_s = time.monotonic() - began
            print(
                f"{what}, {found.void} void rows, {took_s:.0f} s: {'; '.join(found.wrong[:5]) or 'right'}", flush=True
            )
            if found.wrong and args.keep:
                os.makedirs(args.keep, exist_ok=True)
                Path(args.keep, f"{number}.txt").write_text(found.output)
                if (folder / "run" / LEDGER).exists():
                    Path(args.keep, f"{number}.sqlite").write_bytes((folder / "run" / LEDGER).read_bytes())
    print(f"{done} kills in {number} trainings, seed {args.seed}: {'all right' if good else 'WRONG'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

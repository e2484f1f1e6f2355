"""How long is a member away that was killed? Run it with nothing else running: python benchmarks/restarts.py [--json]

A job with two victims: a simple role without a model, and an elastic role of two ranks that form a process group
(gloo) in ``setup()``. Its trainer kills them in turn, by SIGKILL, and measures the time from there until a call is
answered by the new process, and until a collective of the new group has its result. Both are medians of ``ROUNDS``.
All other members must be the processes that they were.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

ROUNDS = 10
SIMPLE_GOAL_S = 0.3
GROUP_GOAL_S = 1.5


class Plain:
    @rpc
    def pid(self) -> int:
        return os.getpid()


class Meter:
    """Kills and measures in ``run()``, and leaves the figures in the run directory."""

    def run(self) -> None:
        plain, group, bystander = RoleGroup("PLAIN"), RoleGroup("GROUP"), RoleGroup("BYSTANDER")
        rounds = current_worker().job_info.user_config["rounds"]
        others = [os.getpid(), *bystander.call("pid").result()]
        figures: dict[str, Any] = {"simple_s": [], "group_s": []}
        for number in range(rounds):
            pid = plain.call("pid").result()[0]
            figures["simple_s"].append(self._away(pid, lambda: plain.options(idempotent=True).call("pid").result()))
            pid = group.call("pid").result()[number % 2]
            figures["group_s"].append(self._away(pid, lambda: self._sum(group)))
        figures["others_unchanged"] = others == [os.getpid(), *bystander.call("pid").result()]
        (current_worker().run_dir / "figures.json").write_text(json.dumps(figures))

    def _away(self, pid: int, call: Any) -> float:
        current_worker().events()
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        call()
        took_s = time.perf_counter() - began
        while not any(event.phase == "ready" for event in current_worker().events(wait_s=10.0)):
            pass
        return took_s

    def _sum(self, group: RoleGroup) -> None:
        """A collective cannot be made again by one rank alone: it is asked for once the group is being replaced."""
        current_worker().events(wait_s=10.0)
        totals = group.call("sum_of_ranks").result()
        assert totals == [3.0, 3.0], totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    builder = DLJobBuilder().device_type("CPU").config({"rounds": options.rounds})
    builder.with_restart(max_restarts=options.rounds, delay_s=0)
    builder.role("PLAIN").run(Plain).resource(cpu=0)
    builder.role("GROUP").train("restarts_rank.Rank").nnodes(1).nproc_per_node(2).resource(cpu=0)
    builder.role("BYSTANDER").run(Plain).total(2).resource(cpu=0)
    builder.role("METER").run(Meter).resource(cpu=0)
    result = builder.build().submit("bench-restarts", view="none")
    seen = json.loads((Path(result.run_dir) / "figures.json").read_text())
    simple_s, group_s = statistics.median(seen["simple_s"]), statistics.median(seen["group_s"])
    figures = {
        "simple_role_away_s": round(simple_s, 4),
        "simple_role_worst_s": round(max(seen["simple_s"]), 4),
        "group_of_2_away_s": round(group_s, 4),
        "group_of_2_worst_s": round(max(seen["group_s"]), 4),
        "others_unchanged": seen["others_unchanged"],
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps(figures))
    else:
        worst_s = figures["simple_role_worst_s"], figures["group_of_2_worst_s"]
        print(f"simple role, no model: {simple_s:.3f} s away (goal {SIMPLE_GOAL_S} s), worst {worst_s[0]:.3f}")
        print(f"group of 2, gloo:      {group_s:.3f} s away (goal {GROUP_GOAL_S} s), worst {worst_s[1]:.3f}")
        print(f"other members unchanged: {seen['others_unchanged']}")
    return 0 if simple_s <= SIMPLE_GOAL_S and group_s <= GROUP_GOAL_S and seen["others_unchanged"] else 1


if __name__ == "__main__":
    sys.exit(main())

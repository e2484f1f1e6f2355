"""The process in which an environment is checked: ``python -m rlmesh.envs.checks.subject``.

It reads one line of JSON from standard input and writes messages, one JSON object per line, to what was its standard
output. What the environment prints goes to standard error.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from rlmesh.errors import UsageError

__all__ = ["GROUPS"]

GROUPS = ("episodes", "end", "determinism", "resources")
"""Groups of checks, in the order in which they run."""


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    job = json.loads(sys.stdin.readline())

    def tell(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        make = _creator(job)
        warnings.simplefilter("ignore")  # Libraries warn about what the checks find; a person reads one of them.
        _run(make, job, tell)
    except UsageError as error:
        tell(usage=str(error))


def _creator(job: dict[str, Any]) -> Callable[[], Any]:
    if job["pickled"] is not None:
        import cloudpickle

        made: Callable[[], Any] = cloudpickle.loads(base64.b64decode(job["pickled"]))
        return made
    from rlmesh.envs.checks.creation import creator_of

    return creator_of(job["name"], job["config"], job["num_envs"])


def _run(make: Callable[[], Any], job: dict[str, Any], tell: Callable[..., None]) -> None:
    from rlmesh.envs.checks import agent_episodes, episodes, repeats, vectors
    from rlmesh.envs.checks.agents import AgentsAsOne, playable
    from rlmesh.envs.checks.calls import WatchedEnv
    from rlmesh.envs.checks.findings import CheckStopped, FindingList

    findings = FindingList(lambda finding: tell(finding=finding))
    plan = episodes.CheckPlan(**job["plan"])
    vector = several = False

    def watched_for(purpose: str) -> WatchedEnv:
        nonlocal vector, several
        watched = WatchedEnv(playable(make), purpose, lambda call, kind: tell(call=call, kind=kind), findings)
        several = isinstance(watched.env, AgentsAsOne)
        vector = hasattr(watched.env, "num_envs") and hasattr(watched.env, "single_action_space")
        return watched

    def group(name: str) -> None:
        if name == "trace":
            watched = watched_for("determinism")
            tell(trace=[vars(step) for step in repeats.trace(watched, plan)])
            watched.close()
        elif name == "determinism":
            tell(trace=[vars(step) for step in repeats.check_determinism(watched_for, plan, findings)])
        elif name == "resources":
            repeats.check_resources(watched_for, plan, findings)
        elif name == "episodes":
            first = watched_for("making the environment")
            first.close()
            single = agent_episodes.check_agent_episodes if several else episodes.check_episodes
            (vectors.check_vector_episodes if vector else single)(watched_for, plan, findings)
        else:
            (vectors.check_last_observations if vector else episodes.check_end)(watched_for, plan, findings)

    for name in job["groups"]:
        tell(begins=name)
        try:
            if name == "end" and "episodes" not in job["groups"]:
                watched_for("making the environment").close()
            group(name)
        except CheckStopped:
            pass
        tell(ends=name)
    tell(done=True)


if __name__ == "__main__":
    main()

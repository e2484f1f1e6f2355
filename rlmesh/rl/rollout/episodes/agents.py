"""Episodes of an agent: a function that calls the policy through an endpoint, and needs no code for training."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.endpoint.sessions import AgentSession
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from rlmesh.rl.rollout.episodes.deadlines import EpisodeThread, PlaceTimeout
from rlmesh.rl.rollout.episodes.plan import EpisodePlan, callable_name
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.types import Episode, Score

if TYPE_CHECKING:
    from rlmesh.rl.rollout.endpoint.server import Endpoint

__all__ = ["play_agent"]


async def play_agent(
    plan: EpisodePlan, endpoint: Endpoint, spans: ChatSpans, task: EpisodeTask, params: SamplingParams
) -> list[Episode]:
    """Play an episode of the agent; returns an `Episode` per branch.

    Raises:
        Exception: the engine failed, so the episode neither succeeded nor failed.
    """
    assert plan.agent is not None
    settings, name = plan.settings, callable_name(plan.agent)
    session = AgentSession(task, params, settings, spans, plan.most_tokens)
    base_url = endpoint.open_session(session)
    thread = EpisodeThread(f"rlmesh-{task.name}")
    given = {
        "base_url": base_url, "api_key": endpoint.api_key, "model": endpoint.model, "row": task.row, "seed": task.seed,
    }  # fmt: skip
    call = asyncio.ensure_future(
        thread.call(
            plan.agent, timeout_s=settings.episode_timeout_s, place=f"{task.name} agent {name}",
            arguments=_wanted(plan.agent, given),
        )
    )  # fmt: skip
    result, failure = None, ""
    try:
        while not call.done() and not session.error and not session.failure:
            failure = _overdue(session, name)
            if failure:
                break
            await asyncio.wait([call], timeout=min(settings.turn_timeout_s / 4, 1.0))
        if call.done():
            result = _plain(call.result())
    except PlaceTimeout as error:
        failure = str(error)
    except Exception as error:
        if not session.limit:
            failure = f"{task.name} turn {session.turn} agent {name}: {type(error).__name__}: {error}"
    finally:
        call.cancel()
        endpoint.close_session(base_url)
        thread.close()
    if session.error is not None:
        raise session.error
    failure = session.failure or failure
    if not failure and not len(session.recording):
        failure = f"{task.name} agent {name}: it asked the policy for nothing"
    return session.recording.episodes(
        task.prompt, {"result": result}, finish_reason="failed" if failure else session.limit, failure=failure
    )


def _plain(result: Any) -> Any:
    """An agent's result in a form that checkpoints can store.

    Raises:
        TypeError: the agent returned something else than a number, a text, a list or a mapping of these, or a `Score`.
    """
    if isinstance(result, Score):
        return {"score": result.value, **result.metrics}
    if result is None or isinstance(result, bool | int | float | str):
        return result
    if isinstance(result, Mapping):
        return {str(name): _plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [_plain(one) for one in result]
    if isinstance(result, np.generic):
        return result.item()
    raise TypeError(f"an agent returns a number, a text, a list, a mapping or a Score, got {type(result).__name__}")


def _overdue(session: AgentSession, name: str) -> str:
    """The text about an agent that made no request for longer than a turn may take; ``""``: it has time left."""
    limit = session.settings.turn_timeout_s
    since = session.quiet_since
    if since is None or asyncio.get_running_loop().time() - since < limit:
        return ""
    return f"{session.task.name} turn {session.turn} agent {name}: no request in {limit:g} s"


def _wanted(agent: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(agent).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {one.name: given[one.name] for one in parameters if one.name in given}

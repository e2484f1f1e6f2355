"""The agent's process from its event loop to its exit: no process is left below it."""

from __future__ import annotations

import asyncio
import logging
import os

from rlmesh.agent.agent import Agent
from rlmesh.agent.boot import Boot
from rlmesh.agent.monitoring.out_of_memory import end_tasks_without_memory
from rlmesh.agent.monitoring.own_logs import log_to_standard_error
from rlmesh.agent.processes import control_groups, ownership
from rlmesh.agent.protocol import AGENT, AgentConfig, public_address
from rlmesh.errors import LaunchError
from rlmesh.runtime.runtime import Runtime

__all__ = ["run_agent"]

logger = logging.getLogger(__name__)


def run_agent(config: AgentConfig, started: Boot, guardian: int) -> int:
    """Run the agent and return its exit code. No process is left below this one, also after an error.

    ``guardian``: its guardian's process number. If the guardian is gone at the end, the agent removes the node's files.
    """
    import uvloop

    log_to_standard_error()
    try:
        code = uvloop.run(_main(config, started))
    except LaunchError as error:
        logger.error("%s", error)
        code = 1
    finally:
        statuses: dict[int, int] = {}
        ended, running = ownership.kill_descendants(2.0, statuses)
        if ended or running:
            logger.warning("killed at the end: %s; still running: %s", ended, running)
        if os.getppid() != guardian:
            _clean_up_for_the_guardian(config)
    return code


async def _main(config: AgentConfig, started: Boot) -> int:
    end_tasks_without_memory(asyncio.get_running_loop())
    key = bytes.fromhex(config.key_hex)
    name = f"agent:{config.node_rank}"
    public = public_address(config.host)
    async with Runtime.open(
        name=name, key=key, socket_dir=config.socket_dir, public=public, job_id=config.job_id,
        node_rank=config.node_rank,
    ) as runtime:  # fmt: skip
        agent = Agent(config, runtime, started)
        runtime.serve(AGENT, agent, inline=True)
        return await agent.live()


def _clean_up_for_the_guardian(config: AgentConfig) -> None:
    """Clean up in place of the guardian, which was killed."""
    own, _ = control_groups.own_group()
    if own:
        control_groups.end(control_groups.node_group(own, config.job_id, config.node_rank))
    ownership.remove_shared_memory(config.job_id, config.node_rank)
    ownership.remove_folder(config.socket_dir, ownership.hold_folder(config.socket_dir))
    ownership.remove_job_file(config.job_path, config.socket_dir)

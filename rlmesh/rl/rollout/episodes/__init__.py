"""Episodes of several turns, with tools, environments or agents: deadlines, and the recording of all token ids."""

from rlmesh.rl.rollout.episodes.environments import TextEnvironment, TurnResult
from rlmesh.rl.rollout.episodes.outcomes import agent_result, episode_return
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings
from rlmesh.rl.rollout.episodes.tools import Tool, ToolCall

__all__ = ["EpisodeSettings", "TextEnvironment", "Tool", "ToolCall", "TurnResult", "agent_result", "episode_return"]

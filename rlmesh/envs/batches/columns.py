"""Names of the columns of a sample batch, as RLlib spells them."""

from __future__ import annotations

__all__ = [
    "ACTIONS",
    "ACTION_DIST_INPUTS",
    "ACTION_LOGP",
    "ADVANTAGES",
    "AGENT_INDEX",
    "DONES",
    "ENV_REWARDS",
    "EPS_ID",
    "INFOS",
    "MASK",
    "NEW_OBS",
    "NEXT_VALUES",
    "OBS",
    "REWARDS",
    "STATE_IN",
    "STATE_OUT",
    "TERMINATEDS",
    "TRUNCATEDS",
    "VALUE_TARGETS",
    "VF_PREDS",
    "T",
]  # fmt: skip

OBS = "obs"
NEW_OBS = "new_obs"
ACTIONS = "actions"
REWARDS = "rewards"
ENV_REWARDS = "env_rewards"
"""The rewards of the environment, where a connector has changed ``rewards``."""
TERMINATEDS = "terminateds"
TRUNCATEDS = "truncateds"
DONES = "dones"
"""Computed when it is read: ``terminateds | truncateds``. A batch never stores this column."""
INFOS = "infos"
EPS_ID = "eps_id"
"""Names an episode; with several agents, the trajectory of one agent in one episode."""
AGENT_INDEX = "agent_index"
"""With several agents, the place of the agent among those of its episode, in the order of their coming."""
T = "t"
ACTION_LOGP = "action_logp"
ACTION_DIST_INPUTS = "action_dist_inputs"
VF_PREDS = "vf_preds"
NEXT_VALUES = "next_values"
"""The value of the observation after a step: 0 after a terminal step, the final observation's after a truncated one."""
ADVANTAGES = "advantages"
VALUE_TARGETS = "value_targets"
STATE_IN = "state_in"
"""States of a recurrent policy before each step: in forward passes a dict; in batches the columns ``state_in_…``."""
STATE_OUT = "state_out"
"""States after the last step of a forward pass, a dict. No column of a batch."""
MASK = "mask"
"""True where padded sequences have a step."""

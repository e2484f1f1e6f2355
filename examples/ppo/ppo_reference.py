"""The reference: the policy before PPO, for the KL penalty."""

from rlmesh.rl.roles.reference import ReferenceRole


class PPOReferenceActor(ReferenceRole):
    """The built-in reference: override `make_model` for another model."""

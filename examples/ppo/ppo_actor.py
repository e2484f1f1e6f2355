"""The actor: one rank of the policy in training."""

from rlmesh.rl.roles.actor import ActorRole


class PolicyModelActor(ActorRole):
    """The built-in actor: override `make_model` or `loss` for one of your own."""

"""The critic: one rank of the model that estimates the return before each token."""

from rlmesh.rl.roles.critic import CriticRole


class CriticModelRayActor(CriticRole):
    """The built-in critic: override `make_model` or `loss` for one of your own."""

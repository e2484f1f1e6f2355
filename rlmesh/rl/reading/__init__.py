"""Views of a recorded run: its bottleneck (`rlmesh doctor RUN`), a step again, and the policy as a folder."""

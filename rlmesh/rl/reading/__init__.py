"""Tools for a recorded run: find its bottleneck (`rlmesh doctor RUN`), replay a step, export the policy."""

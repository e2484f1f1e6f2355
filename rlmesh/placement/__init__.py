"""Placement: a pure planner that places the members of a job on the nodes' devices, and its inputs."""

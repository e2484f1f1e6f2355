"""Starts one agent on each node of a job, and does nothing else.

On this machine the driver starts the agent (``rlmesh.agent.node_start``); this package reaches other machines.
"""

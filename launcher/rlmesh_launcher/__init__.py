"""Gets one agent onto each node of a job, and does nothing else.

On this machine the driver itself starts the agent (``rlmesh.agent.node_start``); what is here reaches other
machines.
"""

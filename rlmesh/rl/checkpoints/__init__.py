"""Checkpoints of a run: all that a run is, complete or absent, and how a run goes on from one."""

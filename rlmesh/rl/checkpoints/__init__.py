"""Checkpoints of a run: how they are written, each whole or not at all, and how a run resumes from one."""

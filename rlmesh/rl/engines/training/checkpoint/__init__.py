"""Checkpoints of training engines: complete or absent, and readable with any number of ranks."""

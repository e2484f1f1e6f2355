"""Checkpoints of training engines: written whole, read for any number of ranks."""

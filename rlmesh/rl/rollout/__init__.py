"""Sampling for a training: groups of responses to prompts, and the buffer between sampling and training."""

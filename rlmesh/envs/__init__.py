"""Reinforcement learning in environments: runners, batches, modules, learners and algorithms."""

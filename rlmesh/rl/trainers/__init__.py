"""Trainings: their settings, the job that they become, and the training loop."""

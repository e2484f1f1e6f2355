"""A training: its settings, its job, and the training loop."""

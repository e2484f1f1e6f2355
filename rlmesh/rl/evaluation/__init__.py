"""Validation during a training, and evaluation without one: mean@k, maj@k and pass@k."""

"""Batches: columns of equal length, one row per step of an environment."""

"""Processes of a node: start, supervision, resource limits, and cleanup."""

"""Environments: registered names and creators, and vectors of environments that a runner steps."""

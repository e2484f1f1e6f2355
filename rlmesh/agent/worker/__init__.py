"""Modules that run inside a worker process around the user's role object."""

"""Algorithms: sampling, learning and their settings, in one object."""

"""Modules and policies: the networks that choose actions, and what they need for it."""

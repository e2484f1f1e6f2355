"""Distributions of actions: of plain spaces, and of spaces that are composed of them."""

"""Entry points of roles and programs: how they are named, found, and imported."""

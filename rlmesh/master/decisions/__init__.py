"""Decisions of the master: facts in, actions out. No I/O and no clock."""

"""Configurations of other libraries, read as settings of a `Run`, with a list of all keys that have no counterpart."""

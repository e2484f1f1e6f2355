"""Conversion of other libraries' configurations to a `Run`, with a list of the keys that have no counterpart."""

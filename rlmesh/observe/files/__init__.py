"""The files in a run directory that people and tools read."""

"""The actor runtime: one endpoint per process, calls, futures, groups."""

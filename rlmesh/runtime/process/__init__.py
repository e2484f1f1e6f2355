"""Services of a process that uses rlmesh: clocks, event loops, and handling of forks and exit."""

"""What each process of a job needs once: clocks, event loops, and care for forks and exit."""

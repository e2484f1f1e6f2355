"""Where the members of a job run: what nodes have, and a pure planner that places members on them."""

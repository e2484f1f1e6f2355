"""The master of a job: one process that places members, watches them and ends them together."""

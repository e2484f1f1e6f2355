"""The driver: the process that submits a job, shows it, and ends it."""

"""What an agent observes on its node: devices, resource usage, logs, and refused connections."""

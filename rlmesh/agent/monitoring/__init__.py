"""Monitoring of a node by its agent: devices, resource usage, logs, and refused connections."""

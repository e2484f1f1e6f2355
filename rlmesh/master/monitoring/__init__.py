"""Observation of a job by the master: health, activity, call graph, incidents, and metrics."""

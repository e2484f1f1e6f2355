"""Trackers: W&B, MLflow, trackio or a class of the user's get the metrics of a run, each in a process of its own.

A tracker's process reads ``metrics.jsonl`` as it grows. So a tracker costs a step nothing, whatever it does: it may
raise, hang, or be killed.
"""

"""The caller's side of calls: submission, pending calls, retries, and what a caller knows of its peers."""

"""The caller's side of calls: submission, pending calls, retries, and a caller's knowledge of its peers."""

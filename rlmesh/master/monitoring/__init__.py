"""What the master observes of a job: health, activity, call graph, incidents, and metrics."""

"""Output about a job for people: metric files, live view, end report, time use."""

"""The Prometheus endpoint of a job."""

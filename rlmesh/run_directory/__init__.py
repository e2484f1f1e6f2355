"""The run directory: its files, the records of past jobs, and the discovery of running ones."""

"""The description of a job: builders, descriptors, configuration, and their checks."""

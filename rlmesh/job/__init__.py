"""What a job is: builders, descriptors, configuration, the base classes of roles. No I/O."""

"""The description of a job and the interface of its roles: builders, configuration, base classes, status. No I/O."""

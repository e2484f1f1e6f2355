"""What ``rlmesh launch`` is made of besides the command itself."""

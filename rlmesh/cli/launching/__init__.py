"""Parts of ``rlmesh launch`` besides the command itself."""

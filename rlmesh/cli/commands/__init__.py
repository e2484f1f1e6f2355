"""The subcommands of ``rlmesh``, one module each."""

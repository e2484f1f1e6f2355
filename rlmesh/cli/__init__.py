"""The ``rlmesh`` command."""

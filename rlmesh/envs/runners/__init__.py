"""Runners: they step environments with a policy and return batches, in this process or in others."""

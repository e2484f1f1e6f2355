"""Learners: they compute losses of modules and update the modules."""

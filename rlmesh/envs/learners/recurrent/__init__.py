"""Learners of replayed sequences, for modules with memory."""

"""Learners in processes of their own, which average their gradients."""

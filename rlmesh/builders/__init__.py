"""Builders of job descriptions, and ``DLConfig``, the description that they build and that starts itself."""

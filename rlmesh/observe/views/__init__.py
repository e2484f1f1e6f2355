"""Views of a running job on a terminal or in a file."""

"""Transports: they move packets over ZeroMQ, Unix sockets and TCP, and know nothing of calls."""

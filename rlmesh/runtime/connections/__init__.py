"""Connections between runtimes: addresses, handshake, channels, and shared-memory transfers."""

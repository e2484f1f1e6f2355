"""Channels that move weights between processes; `base` is their common contract."""

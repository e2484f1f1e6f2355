"""The per-node daemon that starts, watches and kills worker processes."""

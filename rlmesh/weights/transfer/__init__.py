"""One push of weights: sender, receiver, staging, and the session that connects sender and receivers."""

"""The wire format: envelopes, the codec of values, handshakes, failures as plain data. No sockets."""

"""What travels between processes: envelopes, the codec of values, failures as plain data. Pure: no sockets."""

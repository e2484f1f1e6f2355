"""The rendezvous of a job's nodes: a server on the first node and a client on each other node."""

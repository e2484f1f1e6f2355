"""The rendezvous of the nodes of a job: a server on the first node and a client on each other node."""

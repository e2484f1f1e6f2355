"""The hardware of a machine: its CPUs, memory, and GPUs, and what a process may use of them."""

"""GPU memory and kernels for weight sync."""

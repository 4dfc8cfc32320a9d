"""One file per schedule: how a spec becomes kernels."""

"""Metal kernels: each `.metal` file beside its torch reference and its binding."""

"""One folder per operation: an API that picks a backend, a jnp reference, and kernels for the chips that have one."""

"""One folder an op: the reference in plain jnp, and its kernels."""

"""The strategy for JAX: differences that an optimizer of optax has made are pushed. Private."""

"""Local SGD for JAX: the inner step of a bound optimizer. Imports the JAX adapter and the core. Private."""

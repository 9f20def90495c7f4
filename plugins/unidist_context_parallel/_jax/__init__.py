"""Context parallelism for JAX, whose functions compute shares of a sequence that they ask for.

`axis` exchanges arrays within compiled programs, `functions` has JAX's functions of arrays for the ring, `attention`
computes attention to the keys of all ranks, and `shares` is what scripts call, as `unidist_context_parallel.jax`.
"""

"""ZeRO for optimizers of optax, stages 1 and 2: each rank updates its pieces of the parameters.

`pieces` says which elements of a leaf belong to this rank, `probe` tries an optimizer to see whether leaves may be cut,
`operations` has the calls by which a compiled program exchanges pieces, and `step` is the inner step.

Imports `sharding`, the JAX adapter and the core. Private.
"""

"""ZeRO for JAX: each rank updates its pieces of the parameters, and at stage 3 keeps no others.

`pieces` says which elements of a leaf belong to this rank, `operations` has the calls by which a compiled program
exchanges pieces, and `step` is the inner step of stages 1 and 2. That of stage 3, `stage3`, computes the loss itself,
segment by segment (`stage3_segments`), with calls of its own (`stage3_operations`).

Imports `sharding`, the JAX adapter, the root and the core. Private.
"""

"""Tensor parallelism for JAX: leaves of the parameters are cut, and the loss is evaluated on this rank's parts.

`axis` has the exchanges, `reshaping` and `rules` say what becomes of a cut dim in each operation of a program,
`propagation` evaluates a program so, `roles` cuts a tree by the user's plan, and `binding` puts them together.

Imports `layout`, the JAX adapter and the core. Private.
"""

"""Tensor parallelism for JAX: leaves of the parameters are cut, and the loss is evaluated on this rank's parts.

`axis` has the exchanges, `reshaping` and `rules` say which dim of an operation's results is cut,
`propagation` evaluates a program so, `roles` cuts a tree by the user's plan, and `binding` puts them together.

Imports `layout`, the JAX adapter, the root and the core. Private.
"""

"""Pipelines in JAX: cutting the program of a loss, holding a stage's parameters, computing its passes.

`program` traces a loss, `division` cuts the program, `stage` computes what was cut; `parameters` is what a rank holds,
`tied` adds up gradients, and `runner` runs steps. Imports `execution`, the JAX adapter, the root and the core. Private.
"""

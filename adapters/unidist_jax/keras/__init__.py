"""Keras 3 on JAX: bound optimizers, `distribute`, callbacks, and the rest of `unidist.keras`.

`binding` has the state of a bound optimizer, `inner_step` the part that a strategy replaces if it shards updates,
`mixin` the methods that optimizers get, `checkpoint` has `save` and `load`, `elastic` the state of elastic jobs and
`elastic_fit` what makes `fit` elastic, `facade` the names of `unidist.keras`.

The top of this package: may import any other folder of it.
"""

from unidist_jax.keras.inner_step import InnerStep

__all__ = ["InnerStep"]

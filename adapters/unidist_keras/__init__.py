"""Code shared by adapters whose framework is a backend of Keras.

Callbacks, backups, checkpoints, `fit` in elastic jobs, optimizers whose class is changed, weights of
losses, masks, and seeds.

Knows Keras, and no backend. `callbacks` does not import Keras: an adapter mixes its classes into those of the Keras
that it binds. Adapters and plugins may import the modules listed here.
"""

__all__ = [
    "arguments", "backup", "callbacks", "checkpoint", "elastic_fit", "elementwise", "loss_weight", "masks",
    "metrics", "mixin", "seeds", "unsharded_data",
]  # fmt: skip

"""Code shared by adapters whose framework is a backend of Keras.

Callbacks, backups, checkpoints, `fit` in elastic jobs, optimizers whose class is changed, weights of
losses, running statistics, masks, seeds, and what `TrainStep` has on every backend.

Knows Keras, and no backend. `callbacks` does not import Keras: an adapter mixes its classes into those of the Keras
that it binds. Adapters and plugins may import the modules listed here.
"""

__all__ = [
    "arguments", "backup", "callbacks", "checkpoint", "elastic_fit", "elementwise", "fit_agreement", "losses",
    "metrics", "mixin", "running_statistics", "seeds", "slots", "train_step", "unsharded_data", "variables",
]  # fmt: skip

"""The tracker `tensorboard`: `unidist launch --track tensorboard:runs/1`, then `tensorboard --logdir runs`."""

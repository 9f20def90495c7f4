"""Time and memory of a training step, and the strategies that divide it best."""

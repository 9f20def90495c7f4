"""ZeRO for Keras 3 on TensorFlow: inner steps at stages 1 to 3, in elastic jobs too, and their state in checkpoints.

Imports `fragments` below, `sharding`, the TensorFlow adapter, the root and the core. Private.
"""

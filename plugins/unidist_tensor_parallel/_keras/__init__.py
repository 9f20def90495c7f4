"""Tensor parallelism for Keras on TensorFlow: finds the layers that can be cut, and cuts the model in place.

Imports `layers` below, `layout`, the TensorFlow adapter, the root and the core. Private.
"""

"""Pipelines of Keras models on TensorFlow: dividing the model, computing its stages, `fit`, tied variables.

Imports `tracing` below, `execution`, the TensorFlow adapter, the root and the core. Private.
"""

"""Layers of Keras that compute their part of a cut layer, and the exchanges of the axis as nodes of the host.

Imports `layout`, the TensorFlow adapter and the core. Private but for the loss, which
`unidist_tensor_parallel.keras_losses` exports.
"""

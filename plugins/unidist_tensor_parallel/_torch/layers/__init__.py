"""Layers of PyTorch that compute their part of a cut layer, and the exchanges of the axis as autograd functions.

Imports `layout`, the PyTorch adapter and the core. Private but for the loss, which
`unidist_tensor_parallel.losses` exports.
"""

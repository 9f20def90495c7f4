"""Tensor parallelism for PyTorch: finds the layers that can be cut, checks them, and cuts the model in place.

Imports `layers` below, `layout`, the PyTorch adapter, the root and the core. Private.
"""

"""Pipelines of PyTorch models: dividing the model, computing its stages, split backward passes, tied parameters.

Imports `tracing` below, `execution`, the PyTorch adapter, the root and the core. Private.
"""

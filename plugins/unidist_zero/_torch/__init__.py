"""ZeRO for PyTorch: the inner step of a bound optimizer, its state as shards, and that state in checkpoints.

Imports `parameters` below, `sharding`, the PyTorch adapter, the root and the core. Private.
"""

"""PyTorch models as lists of operations, by `torch.fx` or `torch.export`, and where to cut these lists into stages.

Imports `execution.balance` and torch, but nothing of `_torch` above it. Private.
"""

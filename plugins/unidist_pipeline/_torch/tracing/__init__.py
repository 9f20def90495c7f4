"""PyTorch models as lists of operations, by `torch.fx` or `torch.export`, and where to cut these lists into stages.

Imports `execution` and torch. Private.
"""

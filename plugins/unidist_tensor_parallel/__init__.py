"""Tensor parallelism: large layers of a model are cut, and each rank of the axis `tensor` holds and computes a part.

Megatron-LM's division (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). `plugin.py` registers the strategy.
"""

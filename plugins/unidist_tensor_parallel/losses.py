"""Losses for models whose output layer is cut; for PyTorch."""

from unidist_tensor_parallel._torch_vocabulary import VocabularyCrossEntropy

__all__ = ["VocabularyCrossEntropy"]

"""Losses for models of PyTorch whose output layer is cut; for Keras see `keras_losses`."""

from unidist_tensor_parallel._torch.layers.vocabulary import VocabularyCrossEntropy

__all__ = ["VocabularyCrossEntropy"]

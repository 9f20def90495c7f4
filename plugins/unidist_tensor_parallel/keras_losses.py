"""Losses for models of Keras whose output layer is cut."""

from unidist_tensor_parallel._keras.layers.vocabulary import VocabularyCrossEntropy

__all__ = ["VocabularyCrossEntropy"]

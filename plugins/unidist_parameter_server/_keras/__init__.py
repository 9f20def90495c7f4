"""The strategy for Keras on TensorFlow."""

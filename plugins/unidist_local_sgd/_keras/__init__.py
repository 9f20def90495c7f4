"""Local SGD for Keras 3: the inner step of a bound optimizer. Imports the TensorFlow adapter and the core. Private."""

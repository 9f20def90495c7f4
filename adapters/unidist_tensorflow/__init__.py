"""The TensorFlow adapter. Scripts import it as `unidist.tensorflow`; importing this package imports nothing heavy."""

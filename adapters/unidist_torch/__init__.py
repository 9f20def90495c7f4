"""The PyTorch adapter. Scripts import it as `unidist.torch`; importing this package imports nothing heavy."""

"""Local SGD for PyTorch: the inner step of a bound optimizer. Imports the PyTorch adapter and the core. Private."""

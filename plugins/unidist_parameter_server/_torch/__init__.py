"""The strategy for PyTorch."""

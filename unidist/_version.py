"""The one place that holds the version."""

__version__ = "0.2.0"

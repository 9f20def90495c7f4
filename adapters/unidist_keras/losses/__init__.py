"""Losses of Keras on several ranks: by what they are divided, which weight a rank's loss has, and masks.

May import the modules at the root of this package.
"""

__all__ = ["divisor", "masks", "weight"]

"""Gradient clipping: by the norm of the whole gradient, or element by element.

`plugin.py` registers the strategies, `strategy.py` is all there is to them; the arithmetic is the core's.
"""

"""Gradient accumulation: several backward passes make one update.

A first-party plugin like any other: `plugin.py` registers it, `strategy.py` is all there is to it.
"""

"""Which layers are cut, along which dim, and which part each rank gets: arithmetic and patterns, without a framework.

Loaded by the launcher: imports the core only. Private.
"""

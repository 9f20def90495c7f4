"""Low-rank compression of gradients with feedback of errors (PowerSGD).

A first-party plugin like any other: `plugin.py` registers it, `compressor.py` is what the launcher loads,
`_bucket.py` does the work, in numpy.
"""

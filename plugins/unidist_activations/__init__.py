"""Less memory for activations: they are computed again in the backward pass, or kept outside of the device.

`plugin.py` registers the strategy, `strategy.py` is what users name, `_blocks.py` finds the blocks of a model
(framework-free), `_torch.py` and `_tensorflow.py` change what running a block does.
"""

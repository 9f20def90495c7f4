"""Mixed precision: 16 bits where they do, 32 where they must.

`strategy.py` decides, free of any framework; `_torch.py` and `_tensorflow.py` prepare a model. What the decision means
for others is in `unidist.gradients.precision`, the loss scaler in `unidist.optim.loss_scaling`.
"""

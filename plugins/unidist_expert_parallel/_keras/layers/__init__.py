"""The mixture-of-experts layer for Keras on TensorFlow.

`axis` exchanges tensors, `dispatch` sends tokens to their experts and back, `mixture` is the layer, with its `router`.
Imports `layout`, the TensorFlow adapter and the core. Private.
"""

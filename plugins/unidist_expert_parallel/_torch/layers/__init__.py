"""Mixture-of-experts layers for PyTorch.

`axis` exchanges tensors, `dispatch` sends tokens to their experts and back, `mixture` is the layer, with its `router`,
`experts` and `losses`. Imports `layout`, the PyTorch adapter and the core. Private.
"""

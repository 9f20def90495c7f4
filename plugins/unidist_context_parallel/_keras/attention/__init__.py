"""Attentions of Keras whose queries are some tokens.

`axis` exchanges tensors between ranks. `layers` is added to Keras' classes, `masks` says which keys a query sees,
`functions` has TensorFlow's arrays for the ring, and `exchange` brings the keys and values of other ranks.
"""

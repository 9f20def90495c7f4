"""Context parallelism in Keras on TensorFlow: attentions, and layers that compute each token alone, get some tokens.

`axis` is the communication, `kinds` says what a layer does with tokens, `model` runs a Functional model, `attention`
lets attentions reach the keys of all ranks, `binding` brings them together.
"""

"""Context parallelism in PyTorch: a tensor that knows that its sequence is divided, and rules for what is done with it.

`divided` has the class and its communication, `attention` the exchange of keys and values, `rules` what each operation
becomes, and `binding` divides what a model is called with. Models are not changed.
"""

"""Divided tensors: `tensor` is the class and its dispatch, `axis` the communication of the ranks that have the rows."""

"""The ring of attention in functions that numpy, TensorFlow and JAX have alike; PyTorch has fused kernels for its own.

`arrays` names these functions, `blocks` attends to one rank's keys after the other with a running softmax, and `ring`
brings them. Imports `layout` alone; no framework.
"""

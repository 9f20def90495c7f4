"""Ring attention on array functions that numpy, TensorFlow and JAX share; PyTorch's ring uses fused kernels.

`arrays` names these functions, `blocks` attends to one rank's keys after the other with a running softmax, and `ring`
brings them. Imports `layout` alone; no framework.
"""

"""The division of Keras models. Imports `layers` below, `layout`, the TensorFlow adapter, the root and the core.

Private: scripts import `unidist_expert_parallel.keras`.
"""

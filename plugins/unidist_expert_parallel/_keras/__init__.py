"""The division of Keras models. Imports `layers` below, `layout`, the TensorFlow adapter and the core. Private.

Scripts import `unidist_expert_parallel.keras`.
"""

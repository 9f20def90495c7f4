"""Keras models as lists of operations, and where to cut these lists into stages.

Imports `execution.balance`, Keras and TensorFlow. Private.
"""

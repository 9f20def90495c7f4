"""Stage 3 for Keras models: variables of which a rank holds a fragment, and the FSDP units that gather them.

Imports `sharding`, the TensorFlow adapter and the core. Private.
"""

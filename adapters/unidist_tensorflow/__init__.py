"""The TensorFlow adapter. Scripts import it as `unidist.tensorflow`; importing this package imports nothing heavy.

The modules at its root know arrays, buffers and the version of Keras, and import no folder. Folders import those below
them: `operations` and `framework`, then `gradients` and `checkpoint`, `optimizer`, `elastic`, `training`, at the top
`keras`. Plugins may import the modules and folders listed here, and of a folder the names it lists.
"""

__all__ = ["checkpoint", "elastic", "framework", "gradients", "keras", "memory", "operations", "optimizer", "training"]

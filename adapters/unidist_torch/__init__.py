"""The PyTorch adapter. Scripts import it as `unidist.torch`; importing this package imports nothing heavy.

The modules at its root know buffers and memory, and import no folder. Folders import those below them: `operations` and
`framework`, then `loading`, `models`, `gradients` and `checkpoint`, then `optimizer` and `elastic`, and `training` at
the top; `engines` is beside them. Plugins may import the modules and folders listed here, and of a folder the names it
lists.
"""

__all__ = [
    "allocator", "checkpoint", "cuda_graphs", "elastic", "engines", "file_names", "framework", "gradients",
    "host_copies", "loading", "memory", "models", "operations", "optimizer", "parameter_states", "training",
]  # fmt: skip

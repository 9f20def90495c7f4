"""The JAX adapter. Scripts import it as `unidist.jax`; importing this package imports nothing heavy.

The modules at its root know arrays and buffers, what JAX is doing, and its versions, and import no folder. Folders
import those below them: `compiled`, `operations` and `framework`, then `optimizer`, `models`, `checkpoint`, `elastic`,
`training`, and `keras` at the top. Plugins may import the modules and folders listed here, and of a folder the names it
lists. Parts of JAX that its next version may change are used in the modules that pyproject.toml lists, and each says
what it relies on.
"""

__all__ = ["compiled", "framework", "keras", "memory", "models", "operations", "optimizer"]

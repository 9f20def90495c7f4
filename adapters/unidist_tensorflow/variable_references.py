"""Variables as keys of dictionaries, as scripts import it from `horovod.tensorflow.util`."""

from __future__ import annotations

from typing import Any

__all__ = ["refs_to_vars", "vars_to_refs"]


def vars_to_refs(vars: Any) -> Any:
    """Return the reference of a variable, which can be a key; for lists of variables, also nested, tuples of them."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variable of a reference; for tuples of references, also nested, lists of variables."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()

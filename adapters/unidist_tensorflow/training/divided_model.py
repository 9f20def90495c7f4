"""Steps around the division of a Keras model over ranks: equal values before, the check of the optimizer after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UsageError
from unidist_keras.checkpoint import stable_paths
from unidist_tensorflow.memory import dtype_of
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.optimizer.elementwise import needs_whole_variables
from unidist_tensorflow.optimizer.gathered_step import CutVariable

if TYPE_CHECKING:
    from unidist.runtime.context import Context


def prepare_to_divide(model: Any, optimizer: Any, runtime: Context) -> None:
    """Broadcast rank 0's values of the whole model, and form the groups of the mesh. Collective over all ranks.

    Raises:
        UsageError: the model has no variables yet, or the optimizer has some.
    """
    if not getattr(model, "built", False):
        raise UsageError(
            "a model that is divided over ranks must have its variables: give it an Input, or call model.build(shape) "
            "before it is distributed"
        )
    if getattr(optimizer, "built", False):
        raise UsageError(
            "the optimizer has state of the whole model already, and the model is to be divided over ranks: give a new "
            "one, and load a checkpoint (unidist's load) afterwards"
        )
    broadcast_variables(list(model.weights), root_rank=0)  # not seeds: data ranks have their own random numbers
    runtime.divide()


def variables_to_gather(model: Any, optimizer: Any) -> list[CutVariable]:
    """Return the variables that are cut, if an optimizer looks at whole ones.

    Raises:
        UsageError: it cannot update this rank's part of a divided model, or nobody says over which ranks it is cut.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for option in ("global_clipnorm", "clipnorm"):
        if getattr(inner, option, None) is not None:
            raise UsageError(
                f"{type(inner).__name__}({option}=...) sees this rank's part of a divided model only. Leave it out and "
                "use --strategy clip_norm=..., which takes the norm over all ranks"
            )
    places = placements_of(model)
    cut: list[CutVariable] = []
    forms, unknown = [], []
    for path, variable in stable_paths(model.trainable_variables).items():
        placement = places.placement(path, tuple(variable.shape), dtype_of(variable))
        forms.append((str(variable.path), placement.shape))
        if placement.shape != tuple(variable.shape):
            axis = places.cut_axis(path)
            cut += [] if axis is None else [CutVariable(variable, placement, axis)]
            unknown += [path] if axis is None else []
    if not needs_whole_variables(inner, None, forms):  # asked in any case: it refuses what looks at all variables
        return []
    if unknown:
        raise UsageError(
            f"{type(inner).__name__} looks at a variable's whole tensor, and {unknown[0]!r} (with {len(unknown) - 1} "
            "more) is cut over ranks by a strategy that does not say over which. Use an element-wise optimizer (SGD, "
            "Adam, AdamW, RMSprop, ...), or pipeline and zero, which leave variables whole"
        )
    return cut

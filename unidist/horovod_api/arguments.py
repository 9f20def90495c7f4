"""The arguments of Horovod's distributed optimizers and tapes: checked as Horovod does, with its exceptions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.gradients import CompressorSpec
from unidist.gradients.compression import GradientCompressor, build_compressor
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.reduce_ops import Op
from unidist.mesh import REPLICA_AXES
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.options import check_numbers
from unidist.registry import Registry
from unidist.runtime.context import Context

Groups = int | Sequence[Sequence[Any]] | None
Position = Callable[[Any], int | None]
"""Returns the position of a member of `groups` among the optimizer's parameters; None: it is not among them.

Raises ValueError for what is no parameter.
"""


@dataclass(frozen=True)
class OptimizerArguments:
    """The arguments of Horovod's distributed optimizers and tapes, by name. Its facades have them in different orders.

    Args:
        compression: how gradients travel, as the script gives it; see `bucket_compressor`.
        op: how the gradients of the ranks are reduced.
        gradient_predivide_factor: gradients are divided by it before the sum, which is multiplied by it.
        num_groups: deprecated; use `groups`.
        groups: gradients of one group travel together: a number of groups, or lists of members.
        sparse_as_dense: sparse gradients travel as dense ones.
        process_set: the ranks that take part.
        name: replaces the optimizer's name, where it has one.
        backward_passes_per_step: passes that make one update.
        average_aggregated_gradients: the mean over those passes instead of their sum.
        scale_local_gradients: gradients of local variables are divided by the number of ranks.
    """

    compression: Any
    op: Op = Op.Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    name: str | None = None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    scale_local_gradients: bool = True

    def exchange_options(
        self, context: Context, *, compressor: GradientCompressor | None, position: Position
    ) -> ExchangeOptions:
        """Check the arguments that concern the exchange of gradients, and return them as its options.

        Args:
            context: the runtime.
            compressor: for `compression`.
            position: of a member of `groups` among the optimizer's parameters.

        Raises:
            ValueError: arguments that Horovod refuses.
        """
        factor, process_set, groups = self.gradient_predivide_factor, self.process_set, self.groups
        if factor != 1.0 and self.op != Op.Average:
            raise ValueError(
                f"gradient_predivide_factor={factor} with op={Op(self.op).name}: it splits an average; "
                "use op=Average, or leave it out"
            )
        if not factor > 0:
            raise ValueError(f"gradient_predivide_factor={factor}: give a factor above 0")
        if self.num_groups != 0:
            warnings.warn("num_groups is deprecated, as in Horovod; use groups", DeprecationWarning, stacklevel=4)
            groups = self.num_groups if groups is None else groups
        if process_set.process_set_id is None:
            raise ValueError(
                f"{process_set!r} is not registered; pass it to init(process_sets=[...]) or add_process_set"
            )
        is_global = process_set is global_process_set or process_set.process_set_id == 0
        if not is_global and context.axis_size(REPLICA_AXES) != context.topology.world_size:
            raise ValueError(
                f"{process_set!r} and {context.plan.mesh}: a process set needs the same parameters on all ranks"
            )
        return ExchangeOptions(
            compressor=compressor,
            predivide_factor=float(factor),
            process_set=None if is_global else process_set,
            groups=_positions(groups, position),
            sparse_as_dense=self.sparse_as_dense,
        )


def check_passes(backward_passes_per_step: int) -> None:
    """Raise ValueError unless there is at least one backward pass per step."""
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be > 0")


def bucket_compressor(
    compression: Any,
    registry: Registry[CompressorSpec],
    *,
    members: Mapping[type[Any], GradientCompressor | None],
    otherwise: Callable[[Any], GradientCompressor],
) -> GradientCompressor | None:
    """Return the compressor of buckets that a script's `compression=` asks for.

    Args:
        compression: a name with options ("powersgd/rank=2"), a compressor of buckets, or what `members` and
            `otherwise` know.
        registry: of compressors by name.
        members: those of the framework's `Compression`; None leaves the choice to the strategy.
        otherwise: for anything else; raises ValueError for what is no compressor.

    Raises:
        ConfigurationError: an unknown name.
        ValueError: something that is no compressor.
    """
    if isinstance(compression, str):
        return build_compressor(compression, registry)
    if isinstance(compression, GradientCompressor):
        check_numbers(compression, has_value=False, signs=False)
        compression.validate()
        check_numbers(compression, has_value=False)
        return compression
    if isinstance(compression, type) and compression in members:
        return members[compression]
    return otherwise(compression)


def check_groups(groups: Groups) -> None:
    """Raise ValueError unless this is None, a number of groups above 0, or a list of them."""
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups={groups}: give a positive number of groups, or a list of lists of parameters")
    if not isinstance(groups, int | Sequence | None):
        raise ValueError(f"groups should be a positive integer or a list of lists of parameters, not {type(groups)}")


def _positions(groups: Groups, position: Position) -> int | tuple[tuple[int, ...], ...] | None:
    check_groups(groups)
    if groups is None or isinstance(groups, int):
        return groups
    members = [member for group in groups for member in group]
    if len({id(member) for member in members}) != len(members):
        raise ValueError("a parameter can only appear once in groups")
    # As in Horovod, what is not the optimizer's is left out.
    found = [[position(member) for member in group] for group in groups]
    return tuple(tuple(place for place in group if place is not None) for group in found)

"""Options of one optimizer's gradient exchange that a script chooses, besides the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, UsageError
from unidist.mesh import REPLICA_AXES

if TYPE_CHECKING:
    from unidist.gradients.compression import GradientCompressor
    from unidist.gradients.precision import Precision
    from unidist.negotiation.process_sets import ProcessSet
    from unidist.runtime_api import RuntimeAPI


@dataclass(frozen=True)
class ExchangeOptions:
    """Options that a binding passes to `GradientOwner.make_exchange`. The defaults request nothing special.

    Args:
        compressor: of gradients; None leaves it to the strategy.
        predivide_factor: gradients are divided by it before they are added up, and their sum multiplied by it, so
            that sums of 16-bit numbers stay in range.
        process_set: gradients are exchanged within this set; a rank outside of it is alone. None: all ranks
            that hold the same parameters.
        groups: gradients of one group are exchanged together: a number of groups, or the positions of each group's
            parameters among the optimizer's. Other gradients are packed as suits the engine.
        sparse_as_dense: exchange sparse gradients in a bucket like dense ones, then make them sparse again.
        bucket_bytes: size of a bucket; None leaves it to the strategy.
        precision: the types of the run, see `unidist.gradients.precision`; None: each parameter in its own type.
        whole_tensors: if gradients are sharded, do not split that of a parameter: the optimizer needs all of it.
        gradient_axis: without a process set, the mesh axis over whose ranks gradients are summed. `Update` sets it, as
            parameters that a strategy divides over some of the replicas (experts) have an exchange of their own.
    """

    compressor: GradientCompressor | None = None
    predivide_factor: float = 1.0
    process_set: ProcessSet | None = None
    groups: int | tuple[tuple[int, ...], ...] | None = None
    sparse_as_dense: bool = False
    bucket_bytes: int | None = None
    precision: Precision | None = None
    whole_tensors: bool = False
    gradient_axis: str = REPLICA_AXES

    def __post_init__(self) -> None:
        if not self.predivide_factor > 0:
            raise UsageError(f"predivide_factor={self.predivide_factor}: give a factor above 0")

    def check_supported_by(self, strategy: str) -> None:
        """Raise unless these are the defaults, for an owner that does not support other options.

        Raises:
            ConfigurationError: names the option and the strategy.
        """
        asked = [
            name
            for name, is_asked in (
                ("a compression", self.compressor is not None),
                ("a process set", self.process_set is not None),
                ("a predivide factor", self.predivide_factor != 1.0),
            )
            if is_asked
        ]
        if asked:
            raise ConfigurationError(
                f"the optimizer was given {', '.join(asked)}, which strategy {strategy!r} does not support; leave it "
                "out, or use the strategy 'data'"
            )

    def group_numbers(self, positions: Sequence[int]) -> dict[int, int]:
        """Return the group of each parameter that is in one.

        Args:
            positions: of the parameters that have gradients, ascending; a number of groups divides them evenly.
        """
        if self.groups is None:
            return {}
        if not isinstance(self.groups, int):
            return {position: number for number, group in enumerate(self.groups) for position in group}
        return {position: i * self.groups // len(positions) for i, position in enumerate(positions)}

    def num_ranks(self, context: RuntimeAPI) -> int:
        """Return the number of ranks over which gradients are added up, including this one."""
        if self.process_set is None:
            return context.axis_size(self.gradient_axis)
        return len(self.process_set.ranks) if self.process_set.included() else 1

    def communicator(self, context: RuntimeAPI, *, memory: str = "host") -> Communicator:
        """Return a new communicator over the ranks that exchange gradients. Collective over them.

        Raises:
            ConfigurationError: a process set, and gradients outside of host memory.
        """
        if self.process_set is None:
            return context.new_communicator(self.gradient_axis, memory=memory)
        if memory != "host":
            raise ConfigurationError(
                f"gradients in {memory} memory cannot be exchanged within {self.process_set!r}; leave process_set out, "
                "or keep the model on the CPU"
            )
        if self.process_set.included():
            return self.process_set.new_communicator()
        from unidist.engines.single import SingleCommunicator

        return SingleCommunicator(member=context.topology.rank)

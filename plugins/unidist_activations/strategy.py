"""The strategy `activations=recompute|offload`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.errors import ConfigurationError, unknown_choice
from unidist.strategy.interface import Plan, Strategy
from unidist_activations._blocks import PATTERN_SEPARATOR, find_blocks

if TYPE_CHECKING:
    from unidist.cost_model.figures import Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.runtime_api import RuntimeAPI
    from unidist_activations.binding import ModelBinding


@dataclass(frozen=True)
class Activations(Strategy, EstimatesMemory):
    """Keeps less of the forward pass until the backward pass; the numbers stay the same.

    Works with every other strategy that leaves a model's blocks whole; changes nothing in evaluation.

    Args:
        policy: "recompute": of a block only its inputs are kept, and the backward pass computes the rest again: about a
            third more arithmetic. "offload": everything is kept, but in host memory, or in a file.
        blocks: patterns of paths of modules, with "+" between them: "encoder.layers.*+decoder.layers.*", for Keras
            "block_*". A "*" stands for anything inside of one name. Default: the blocks that the model repeats.
        path: for offload: a folder, on a disk, for files that are mapped to memory; they have no names, so nothing is
            left behind. Default: host memory, for models on an accelerator.
    """

    name: ClassVar[str] = "activations"

    policy: Literal["recompute", "offload"]
    blocks: str | None = None
    path: str | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `blocks`, none if they are to be found."""
        return () if self.blocks is None else tuple(item.strip() for item in self.blocks.split(PATTERN_SEPARATOR))

    def validate(self, plan: Plan) -> None:
        """The options go together, and no pattern is empty."""
        if self.policy not in ("recompute", "offload"):
            raise unknown_choice("value for activations:", str(self.policy), ("recompute", "offload"))
        if self.path is not None and self.policy != "offload":
            raise ConfigurationError(
                f"activations={self.policy}:path={self.path}: only activations=offload keeps anything in files"
            )
        if not all(self.patterns):
            raise ConfigurationError(
                f"activations:blocks={self.blocks!r} has an empty pattern. Syntax: PATTERN+PATTERN, "
                "for example encoder.layers.*+decoder.layers.*"
            )

    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """Change how the model runs its blocks; the model, its paths and its hooks stay. No communication.

        Raises:
            ConfigurationError: a pattern matches nothing, or no blocks are found; offload is not possible here.
            UsageError: the model is of an unknown framework.
        """
        framework = context.plugins.framework_of(model)
        binding: ModelBinding = context.plugins.binding(self.name, framework)
        found = find_blocks(binding.members(model), self.patterns, separator=binding.separator)
        if self.policy == "recompute":
            binding.recompute(model, found)
        else:
            binding.offload(model, found, path=self.path, rank=context.topology.rank)
        return model

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        place: Literal["host", "file"] = "host" if self.path is None else "file"
        return replace(memory, activations=replace(memory.activations, policy=self.policy, place=place))

    @classmethod
    @override
    def alternatives(cls) -> Sequence[str]:
        return ("activations=recompute",)

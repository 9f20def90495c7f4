"""The strategy `tensor=N`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.cost_model.step_interface import PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS
from unidist.strategy.interface import KeepsDivision, Plan, Strategy
from unidist_tensor_parallel import planning
from unidist_tensor_parallel.binding import KeepsCuts
from unidist_tensor_parallel.layout.cuts import AXIS
from unidist_tensor_parallel.layout.roles import Role, check_roles, read_roles

if TYPE_CHECKING:
    from unidist.cost_model.figures import Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.step_interface import RemainingRanks, SearchProblem
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel.binding import TensorBinding


@dataclass(frozen=True)
class TensorParallel(Strategy, KeepsDivision, EstimatesMemory, PredictsStepTime):
    """Cuts the large layers of a model over neighbouring ranks, which compute one batch together.

    Linear layers are cut in pairs, by columns and then by rows, attention by heads, and the vocabulary: each block
    costs one sum over the ranks forward and one backward (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

    Args:
        size: number of ranks that a layer is cut over.
        plan: which layers, and how: patterns of paths with roles, `"blocks.*.up=column+blocks.*.down=row"`, a file of
            YAML or JSON with them, or (in Python) a mapping. Default: pairs and attentions are found automatically.
        sequence: activations between the cut layers are cut along the sequence (Korthikanti et al. 2022,
            https://arxiv.org/abs/2205.05198): less memory, the same traffic.
    """

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str | None] = AXIS
    axis_order: ClassVar[int] = 100

    size: int
    plan: str | None = None
    sequence: bool = False

    def __post_init__(self) -> None:
        """Accept a mapping as the plan."""
        given: Any = self.plan
        if isinstance(given, Mapping):
            text = "+".join(f"{pattern}={role}" for pattern, role in check_roles(given).items())
            object.__setattr__(self, "plan", text)

    @property
    @override
    def returns_parts(self) -> bool:
        """True with a plan of the user's, which may leave the last layer's outputs cut."""
        return self.plan is not None

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    def validate(self, plan: Plan) -> None:
        """Check the size, and that the roles can be read."""
        if self.size < 1:
            raise ConfigurationError(f"tensor={self.size}: give a number of ranks, at least 1")
        roles = self.roles() or {}
        others = [name for name in plan.model_axes if name != AXIS]
        if others and self.size > 1 and (self.sequence or Role.SEQUENCE in roles.values()):
            raise ConfigurationError(
                f"tensor: sequence=true needs all blocks on every rank of its axis, and they are divided by "
                f"{' and '.join(others)}. Leave sequence out, or the other strategy"
            )
        dividers = [item.name for item in plan.strategies if "sequence" in item.axis_divides and item.axis_size != 1]
        if dividers and self.size > 1 and (self.sequence or Role.SEQUENCE in roles.values()):
            raise ConfigurationError(
                f"tensor: sequence=true and {' and '.join(dividers)} both divide the tokens of a sample. Leave "
                "sequence out: its ranks then repeat the work between cut layers on the tokens that they have"
            )
        for item in plan.strategies:
            if item.axis == DATA_AXIS and item.changes_model and self.size > 1:
                raise ConfigurationError(
                    f"strategies 'tensor' and {item.name!r}: both take parameters out of their layers. Use zero=1 or "
                    "zero=2 with tensor: a rank holds a part of the cut parameters anyhow"
                )

    def roles(self) -> dict[str, Role] | None:
        """Return the user's roles; None if layers are to be found automatically.

        Raises:
            ConfigurationError: they cannot be read.
        """
        return None if self.plan is None else read_roles(self.plan)

    @override
    def partition(self, model: Any, context: RuntimeAPI) -> Any:
        """See `Strategy.partition`: layers are cut in place.

        Raises:
            ConfigurationError: a pattern matches nothing, or a layer cannot be cut; says why and what to do.
        """
        if self.size == 1:
            return model
        return self._binding(model, context).partition(self, model, context)

    @override
    def division(self, model: Any, context: RuntimeAPI) -> Any:
        return None if self.size == 1 else self._keeping(model, context).division(model)

    @override
    def rejoin(self, model: Any, context: RuntimeAPI, division: Any) -> Any:
        return model if self.size == 1 else self._keeping(model, context).rejoin(model, context, division)

    @override
    def rebind(self, model: Any, context: RuntimeAPI) -> None:
        if self.size > 1:
            self._keeping(model, context).rebind(model, context)

    def _binding(self, model: Any, context: RuntimeAPI) -> TensorBinding:
        binding: TensorBinding = context.plugins.binding(self.name, context.plugins.framework_of(model))
        return binding

    def _keeping(self, model: Any, context: RuntimeAPI) -> KeepsCuts:
        binding = self._binding(model, context)
        if not isinstance(binding, KeepsCuts):
            raise ConfigurationError(
                f"tensor={self.size} in an elastic job: a model of {context.plugins.framework_of(model).name} cannot "
                "go on when ranks change, as one of PyTorch can"
            )
        return binding

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return planning.estimated(memory, self.size, cuts_sequence=self.sequence)

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return planning.predicted(step, self.size, problem, cuts_sequence=self.sequence)

    @classmethod
    @override
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        return planning.proposed(remaining)


Tensor = TensorParallel
"""The name that scripts may still have."""

"""The interface of step predictions: strategies report what they change in a step, and which of their values to try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unidist.cost_model.memory_interface import EstimatesMemory

if TYPE_CHECKING:
    from unidist.cost_model.cluster import Cluster
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.work import CountedPass, ModelWork
    from unidist.runtime_api import Plugins
    from unidist.strategy.interface import Plan


@dataclass(frozen=True)
class SearchProblem:
    """The input of a search, the same for all compared divisions.

    Args:
        work: of one update of the model.
        cluster: the machines.
        world_size: number of ranks.
        plugins: loaded; a strategy may look up what its options name (a schedule).
    """

    work: ModelWork
    cluster: Cluster
    world_size: int
    plugins: Plugins


@dataclass(frozen=True)
class RemainingRanks:
    """The ranks and pieces that earlier choices of a search have left. Strategies choose by axis, the innermost first.

    Args:
        problem: of the search.
        ranks: ranks that no axis has claimed yet; the size of an axis must divide it.
        num_pieces: pieces in which the batch of one rank is computed so far, one after the other.
        sample_ranks: ranks that other axes divide samples over (experts).
    """

    problem: SearchProblem
    ranks: int
    num_pieces: int = 1
    sample_ranks: int = 1

    def samples(self, axis_size: int = 1) -> int:
        """Return the samples of one piece on one rank if an axis of `axis_size` is claimed; 0 if they do not divide."""
        replicas = self.ranks // axis_size * self.num_pieces * self.sample_ranks
        return 0 if self.problem.work.batch % replicas else self.problem.work.batch // replicas


class PredictsStepTime(ABC):
    """Capability of a `Strategy`: it changes the duration of a step. Others are assumed to change nothing.

    A trivial implementation returns `step` unchanged. That of `data` is one line, see `unidist.cost_model.allreduced`.
    """

    @abstractmethod
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        """Return a rank's work in a step with this strategy. Pure; called for each strategy, in the plan's order.

        If ranks differ (a pipeline's stages), it is the work of the busiest rank.

        Args:
            step: a rank's work with the strategies before this one. Multiply shares and add exchanges
                (`step.divided`, `step.exchanging`, `step.in_pieces`), never set them: then the order does not matter.
            plan: all strategies, and the mesh: `plan.mesh.size("data")` is the number of replicas.
            problem: the model, the machines, the plugins.

        Raises:
            ConfigurationError: the model, the batch or the machines do not allow it: heads that do not divide,
                fewer layers than stages. The division is then left out of a search.
        """

    @classmethod
    def proposals(cls, remaining: RemainingRanks) -> Sequence[str]:
        """Return the items of a strategy line for a search to try, besides leaving the strategy out.

        The default is what `unidist estimate` compares (`EstimatesMemory.alternatives`). Pure and fast: it is called
        for every choice of the strategies before this one.

        Args:
            remaining: the ranks and pieces that earlier choices have left.
        """
        return cls.alternatives() if issubclass(cls, EstimatesMemory) else ()


class CountsOperations(ABC):
    """Capability of a `Framework`: counts the operations of a model's forward pass."""

    @abstractmethod
    def count(self, model: Any, inputs: Sequence[Any]) -> CountedPass:
        """Return what one forward pass computes. If possible nothing is computed; the model stays as it is.

        Args:
            model: possibly without memory for its parameters.
            inputs: arguments of its forward pass; the first dim of the first tensor is that of the samples.

        Raises:
            ConfigurationError: the model has nothing that blocks could be made of.
        """


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]

"""Zero-bubble schedules that are searched for given times and memory (Qi et al. 2024, arXiv:2401.10241, section 3.1).

A greedy rule builds a schedule action by action, and three choices of the rule are open. All eight combinations are
built, and the one whose longest rank takes least time is the schedule. The rule:

- Before the first backward, a rank computes forwards until the gradient arrives, within the memory limit. First choice:
  whether it begins another one that delays this backward.
- Then forwards and backwards for the inputs follow in turns. Second choice: whether a rank that is two forwards or more
  ahead of the next one leaves a forward out.
- A gradient of weights is computed where a rank would wait at least as long as it takes, where memory must be freed,
  and where waiting would make this rank the one with the longest idle time. Third choice: whether also in shorter gaps.
- At the end come all gradients of weights that are left.
"""

from __future__ import annotations

from itertools import product

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule, round_robin

_MARGIN = 1e-9
"""Sums of parts of a micro-batch may exceed the limit by rounding."""


def zb_1p(size: PipelineSize) -> Schedule:
    """The best schedule that holds p micro-batches, as many as 1f1b (ZB-1p).

    Raises:
        ConfigurationError: more than one stage on each rank, or nothing fits `size.limit`.
    """
    return _searched("zb-1p", size, size.num_ranks)


def zb_2p(size: PipelineSize) -> Schedule:
    """The best schedule that holds 2p micro-batches (ZB-2p); errors as of `zb_1p`."""
    return _searched("zb-2p", size, 2 * size.num_ranks)


def _searched(name: str, size: PipelineSize, limit: float) -> Schedule:
    if size.stages_per_rank != 1:
        raise ConfigurationError(
            f"{name} has one stage on each rank, not {size.stages_per_rank}; zbv and v-half have two."
        )
    limit = limit if size.limit is None else size.limit
    found = [
        built
        for choices in product((False, True), repeat=3)
        if (built := _Rule(size, limit, *choices)).fits_after_building()
    ]
    if not found:
        raise ConfigurationError(
            f"{name} with {size.num_ranks} ranks and {size.num_microbatches} micro-batches does not fit the limit of "
            f"{limit:g} micro-batches on each rank. Allow more, or use v-min, which holds a third of 1f1b."
        )
    best = min(found, key=lambda built: (built.longest_span, max(built.clock)))  # of equal ones the first
    return complete(name, size, round_robin(size), best.actions)


class _Rule:
    """Builds one schedule, and keeps the times of its actions as it goes.

    Args:
        size: of the pipeline, with the times.
        limit: micro-batches that a rank holds.
        delays: more forwards are begun before the first backward than end before its gradient arrives.
        skips: ranks that are ahead leave out forwards.
        greedy: gradients of weights fill gaps that are shorter than they are.
    """

    def __init__(self, size: PipelineSize, limit: float, delays: bool, skips: bool, greedy: bool) -> None:
        self.size, self.limit = size, limit + _MARGIN
        self.delays, self.skips, self.greedy = delays, skips, greedy
        num = size.num_ranks
        self.actions: list[list[Action]] = [[] for _ in range(num)]
        self.clock, self.idle, self.held = [0.0] * num, [0.0] * num, [0.0] * num
        self.longest_idle = 0.0
        self._forward_ends: list[list[float]] = [[] for _ in range(num)]
        self._input_ends: list[list[float]] = [[] for _ in range(num)]
        self._num_weights = [0] * num

    @property
    def longest_span(self) -> float:
        """The longest time of a rank from its first action to the end of its last one."""
        begin = (ends[0] - self.size.times.forward for ends in self._forward_ends)
        return max(end - start for start, end in zip(begin, self.clock, strict=True))

    def fits_after_building(self) -> bool:
        """Build the schedule; return False if it does not fit the memory."""
        ranks, last = range(self.size.num_ranks), self.size.num_ranks - 1
        if self.limit < 1:
            return False
        self._begin()
        for microbatch in range(1, self.size.num_microbatches):
            for rank in self._ranks_with_a_forward():
                if not self._free(rank):
                    return False
                if rank:
                    self._fill(rank, self._activation_at(rank, len(self._forward_ends[rank])))
                self._forward(rank)
            for rank in reversed(ranks):
                if rank < last:
                    self._fill(rank, self._gradient_at(rank, microbatch))
                if rank == 0 and len(self._forward_ends[0]) == self.size.num_microbatches:
                    self._remaining_weights(0)  # nobody waits for its inputs' gradients
                self._input_gradient(rank)
        for rank in ranks:
            self._remaining_weights(rank)
        return True

    def _begin(self) -> None:
        """Everything up to each rank's first backward."""
        size, times = self.size, self.size.times
        ranks, last = range(size.num_ranks), size.num_ranks - 1
        for rank in ranks:
            self._forward(rank)
        more = [0] * size.num_ranks
        arrival = self.clock[last] + times.backward_input + times.message
        for rank in reversed(range(last)):
            clock, held = self.clock[rank], self.held[rank]
            while 1 + more[rank] < size.num_microbatches and held + 1 <= self.limit:
                if clock >= arrival if self.delays else clock + times.forward > arrival:
                    break
                clock, held = clock + times.forward, held + 1
                more[rank] += 1
            arrival = max(clock, arrival) + times.backward_input + times.message
        for rank in ranks[1:]:  # a rank is ahead of the next one as long as there are forwards left
            most = more[rank - 1] if 1 + more[rank - 1] >= size.num_microbatches else max(0, more[rank - 1] - 1)
            more[rank] = min(more[rank], most)
        for rank in ranks:
            for _ in range(more[rank]):
                self._forward(rank)
        for rank in reversed(ranks):
            self._input_gradient(rank)

    def _ranks_with_a_forward(self) -> list[int]:
        """Return the ranks that compute a forward in this turn, from front to back."""
        has_next = True
        chosen = []
        for rank in reversed(range(self.size.num_ranks)):
            left = len(self._forward_ends[rank]) < self.size.num_microbatches
            has_next = has_next and left and not self._skips_forward(rank)
            if has_next:
                chosen.append(rank)
        return chosen[::-1]

    def _skips_forward(self, rank: int) -> bool:
        if not self.skips or rank + 1 == self.size.num_ranks:
            return False
        if len(self._forward_ends[rank]) < len(self._forward_ends[rank + 1]) + 2:
            return False
        times = self.size.times
        gradient = self.clock[rank + 1] + times.forward + times.backward_input + times.message
        if self.clock[rank] >= gradient:
            return True
        end, held, freed = self.clock[rank] + times.forward, self.held[rank] + 1, self._num_weights[rank]
        while held > self.limit and freed < len(self._input_ends[rank]):
            end, held, freed = end + times.backward_weight, held - times.kept_for_weight, freed + 1
        if end <= gradient:
            return False
        return gradient - self.clock[rank] <= self.longest_idle - self.idle[rank]

    def _fill(self, rank: int, until: float) -> None:
        """Compute gradients of weights while the rank would wait."""
        weight = self.size.times.backward_weight
        while self._has_weights(rank) and self.clock[rank] + weight <= until:
            self._weight_gradient(rank)
        gap = until - self.clock[rank]
        if self._has_weights(rank) and gap > 0 and (self.greedy or gap > self.longest_idle - self.idle[rank]):
            self._weight_gradient(rank)

    def _free(self, rank: int) -> bool:
        """Make room for a micro-batch; return False if there is nothing to free."""
        while self.held[rank] + 1 > self.limit:
            if not self._has_weights(rank):
                return False
            self._weight_gradient(rank)
        return True

    def _has_weights(self, rank: int) -> bool:
        return self._num_weights[rank] < len(self._input_ends[rank])

    def _remaining_weights(self, rank: int) -> None:
        while self._has_weights(rank):
            self._weight_gradient(rank)

    def _activation_at(self, rank: int, microbatch: int) -> float:
        return self._forward_ends[rank - 1][microbatch] + self.size.times.message if rank else 0.0

    def _gradient_at(self, rank: int, microbatch: int) -> float:
        if rank + 1 == self.size.num_ranks:
            return 0.0
        return self._input_ends[rank + 1][microbatch] + self.size.times.message

    def _forward(self, rank: int) -> None:
        ends = self._forward_ends[rank]
        self._take(rank, ActionKind.FORWARD, len(ends), self.size.times.forward, self._activation_at(rank, len(ends)))
        ends.append(self.clock[rank])
        self.held[rank] += 1

    def _input_gradient(self, rank: int) -> None:
        ends, times = self._input_ends[rank], self.size.times
        arrival = self._gradient_at(rank, len(ends))
        self._take(rank, ActionKind.BACKWARD_INPUT, len(ends), times.backward_input, arrival)
        ends.append(self.clock[rank])
        self.held[rank] -= 1 - times.kept_for_weight

    def _weight_gradient(self, rank: int) -> None:
        times = self.size.times
        self._take(rank, ActionKind.BACKWARD_WEIGHT, self._num_weights[rank], times.backward_weight, 0.0)
        self._num_weights[rank] += 1
        self.held[rank] -= times.kept_for_weight

    def _take(self, rank: int, kind: ActionKind, microbatch: int, seconds: float, arrival: float) -> None:
        waits = max(0.0, arrival - self.clock[rank])
        if self.actions[rank]:
            self.idle[rank] += waits
            self.longest_idle = max(self.longest_idle, self.idle[rank])
        self.clock[rank] += waits + seconds
        self.actions[rank].append(Action(kind, rank, microbatch))

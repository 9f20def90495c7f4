"""The inner step of a torch optimizer whose parameters are in a store."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from unidist.errors import UsageError
from unidist.optim import Update
from unidist_parameter_server._torch.rules import counterpart, rule_of
from unidist_parameter_server.binding import ParameterServerBinding
from unidist_parameter_server.optimizers import AddDifference, Momentum, Rule
from unidist_parameter_server.optimizers.interface import Array
from unidist_parameter_server.workers.exchange import PushExchange
from unidist_parameter_server.workers.worker import Worker
from unidist_torch.checkpoint import OptimizerState
from unidist_torch.gradients import sharded_gradient
from unidist_torch.memory import buffer_of
from unidist_torch.optimizer import InnerStep, refuse_scaler
from unidist_torch.parameter_states import ParameterStates, scalar_dtype

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Piece, Placement
    from unidist.optim import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.strategy import ParameterServer


class TorchParameterServer(ParameterServerBinding):
    """See `ParameterServerBinding`."""

    @override
    def inner_step(self, strategy: ParameterServer) -> MakesInnerStep:
        def make(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update) -> InnerStep:
            return TorchStoreStep(strategy, optimizer, plain, update)

        return make


class TorchStoreStep(InnerStep):
    """Pushes gradients, or what the optimizer has made of them, and fetches parameters.

    With push=delta the optimizer's own `state` is this worker's. Else it is given to the store before the first update,
    and is brought up to date when somebody asks for it.

    Args:
        strategy: the options.
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    sharded = True  # `p.grad` has no gradient of all ranks
    shards_state = False

    def __init__(
        self,
        strategy: ParameterServer,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        update: Update,
    ) -> None:
        self.before: Any = None  # see `StoreStep`
        self._options = strategy.worker_options()
        self._strategy = strategy
        self._optimizer = optimizer
        self._states = ParameterStates(optimizer)
        self._plain = plain
        self._update = update
        self._slots: tuple[str, ...] = ()
        self._workers: list[Worker] = []
        if not self._options.difference:
            self._rules()  # refuses what stores do not have
            self._slots = self._used_slots()
        self._parameters: list[torch.Tensor] = []
        self._views: Sequence[torch.Tensor | None] = ()
        self._present: list[bool] = []
        self._num_filled = 0  # the stores of so many workers have the parameters
        self._addresses: list[int] = []
        self._versions: list[int] = []

    def _used_slots(self) -> tuple[str, ...]:
        groups = self._optimizer.param_groups
        if self._plain is torch.optim.SGD and not any(group["momentum"] for group in groups):
            return ()
        return counterpart(self._plain).slots

    @override
    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        """See `InnerStep.parameters_changed`: each exchange gets a store. Collective."""
        self._parameters, self._views = list(parameters), views
        self._present += [False] * (len(parameters) - len(self._present))
        for exchange in self._update.exchanges[len(self._workers) :]:
            assert isinstance(exchange, PushExchange)
            communicator, context = self._update.communicator, self._update.context
            self._workers.append(Worker(self._options, exchange, communicator, context, self._slots))
        self._find_targets()
        self._note_versions()

    @override
    def take(self, first: int, present: Sequence[bool | None]) -> None:
        for index, is_present in enumerate(present, start=first):
            self._present[index] = bool(is_present)
            parameter = self._parameters[index]
            parameter.grad = sharded_gradient(parameter) if is_present else None

    @override
    def step(self, grad_scaler: Any) -> Any:
        """Push and fetch; with push=delta after the optimizer's own step, whose result is returned."""
        refuse_scaler(grad_scaler, self._strategy.name)
        self._prepare()
        result = None
        if self._options.difference:
            for parameter, view, is_present in zip(self._parameters, self._views, self._present, strict=True):
                parameter.grad = view if is_present else None
            result = self._plain.step(self._optimizer)
        rules = self._rules()
        for worker, begin, parameters in self._parts():
            worker.step(
                [rules.get(id(parameter), _ADD) for parameter in parameters],
                # What the script has taken out of its optimizer's groups is left alone.
                [self._present[index] and id(each) in rules for index, each in enumerate(parameters, start=begin)],
            )
        self.skip()
        self._note_versions()
        return result

    @override
    def take_part(self) -> None:
        """See `InnerStep.take_part`: the mean is over all ranks, and this one's gradient is zero."""
        self.step(None)

    @override
    def skip(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @override
    def close(self) -> None:
        for worker in self._workers:
            worker.store.leave()

    # The store

    @property
    def is_filled(self) -> bool:
        """See `StoreStep.is_filled`."""
        return bool(self._workers) and self._num_filled == len(self._workers)

    def is_of(self, context: RuntimeAPI) -> bool:
        """See `StoreStep.is_of`: another runtime gets another step."""
        return True

    def bring(self) -> None:
        """See `StoreStep.bring`."""
        self.pull()
        self._bring_state()

    def before_commit(self) -> None:
        """Do nothing: `state_dict` brings the state."""

    def pull(self) -> None:
        """See `StoreStep.pull`."""
        if self.is_filled:
            self._find_targets()
            for worker in self._workers:
                worker.fetch()
            self._note_versions()

    def settle(self) -> None:
        """See `StoreStep.settle`. Collective."""
        if self.is_filled:
            for worker in self._workers:
                worker.flush()
            self._update.communicator.barrier().wait()
            self.pull()
            self._update.communicator.barrier().wait()

    def _prepare(self) -> None:
        """Before the first update, and when the script has changed parameters: fill the store. Collective then."""
        self._find_targets()
        if self.is_filled and not self._options.difference:
            versions = zip(self._parameters, self._versions, strict=True)
            changed = [index for index, (tensor, version) in enumerate(versions) if tensor._version != version]
            if changed and not self._options.together:
                name = self._update.parameters[changed[0]].name
                raise UsageError(
                    f"the script has changed parameter {name!r} on rank {self._update.context.topology.rank}, but with "
                    "parameter_server=async the parameters are in the store, where other ranks change them meanwhile. "
                    "Change them before the first step, load them on every rank with ud.load(path, model, optimizer), "
                    "or use parameter_server=sync"
                )
            if changed:
                self._num_filled = 0
        rules = self._rules()
        for worker, _, parameters in self._parts()[self._num_filled :]:
            worker.fill(
                functools.partial(self._slot, parameters),
                [self._count(parameter) for parameter in parameters],
                [rules.get(id(parameter), _ADD).first_value for parameter in parameters],
            )
        self._num_filled = len(self._workers)

    def _find_targets(self) -> None:
        """Find the parameters' memory; a script may have given a parameter other memory."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._addresses = addresses
            for worker, _, parameters in self._parts():
                worker.set_targets([_array(parameter) for parameter in parameters])

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter in self._parameters]

    def _parts(self) -> list[tuple[Worker, int, Sequence[torch.Tensor]]]:
        """Return each worker with the number of its first parameter, and its parameters."""
        found: list[tuple[Worker, int, Sequence[torch.Tensor]]] = []
        begin = 0
        for worker in self._workers:
            found.append((worker, begin, self._parameters[begin : begin + worker.num_parameters]))
            begin += worker.num_parameters
        return found

    def _rules(self) -> dict[int, Rule]:
        """Return the rule of each parameter with the present options, by the parameter's identity."""
        found: dict[int, Rule] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            rule: Rule = _ADD if self._options.difference else rule_of(group, self._plain)
            if self._workers and not self._slots and isinstance(rule, Momentum) and rule.momentum:
                raise UsageError(
                    f"group {number} of the optimizer has momentum={group['momentum']}, and no group had any when it "
                    "was distributed: the store has no memory for it. Set the momentum before"
                )
            found |= dict.fromkeys(map(id, group["params"]), rule)
        return found

    # The optimizer's state

    def _slot(self, parameters: Sequence[torch.Tensor], index: int, slot: int) -> Array | None:
        parameter = parameters[index]
        value = self._states.of(parameter).get(self._slots[slot])
        if value is None:
            return None
        in_order = torch.empty_like(parameter.detach())
        return _array(in_order.copy_(value))

    def _count(self, parameter: torch.Tensor) -> int:
        state = self._states.of(parameter)
        if self._options.difference or not counterpart(self._plain).counts:
            return int(state.get("momentum_buffer") is not None)
        return int(state.get("step", 0))

    def _bring_state(self) -> None:
        """Give the optimizer the state that the store has."""
        if not self.is_filled or self._options.difference:
            return
        counts_steps = counterpart(self._plain).counts
        for worker, _, parameters in self._parts():
            slots = [[torch.zeros_like(parameter.detach()) for _ in self._slots] for parameter in parameters]
            arrays = [[_array(tensor) for tensor in kept] for kept in slots]
            counts = worker.state(arrays)
            for parameter, kept, count in zip(parameters, slots, counts, strict=True):
                if count and (self._slots or counts_steps):
                    step = {"step": torch.tensor(float(count), dtype=scalar_dtype())} if counts_steps else {}
                    self._states.replace(parameter, {**step, **dict(zip(self._slots, kept, strict=True))})

    @override
    def state_dict(self) -> dict[str, Any] | None:
        self._bring_state()
        return None

    @override
    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """See `InnerStep.state_loaded`: all ranks fill the store again before the next update."""
        self._num_filled = 0

    @override
    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState | None:
        self._bring_state()
        return _StateOfOne(self._optimizer, placements, is_writer=self._update.communicator.rank == 0)


class _StateOfOne(OptimizerState):
    """The optimizer's state in a checkpoint: that of rank 0, since with push=delta each worker has one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, placements: Mapping[int, Placement], *, is_writer: bool
    ) -> None:
        super().__init__(optimizer, placements)
        self._is_writer = is_writer

    @override
    def pieces(self) -> Sequence[Piece]:
        return super().pieces() if self._is_writer else []


_ADD = AddDifference()


class _Owning(np.ndarray[Any, np.dtype[Any]]):
    """An array that keeps the owner of its memory alive."""

    owner: Any = None


def _array(tensor: torch.Tensor) -> Array:
    """Return the memory of a tensor, flat, in memory order."""
    buffer = buffer_of(tensor.detach())
    if not buffer.count:
        return np.empty(0, buffer.dtype.value)
    array = np.frombuffer(buffer.bytes(), buffer.dtype.value).view(_Owning)
    array.owner = buffer
    return array

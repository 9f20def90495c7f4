"""The suite of framework adapters finds the faults that adapters have: each is run against one with a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from unidist.buffer import Buffer, DType
from unidist.framework import Framework
from unidist.testing import FrameworkConformance
from unidist_torch.framework import TorchFramework


class Copies(TorchFramework):
    def buffer(self, tensor: Any) -> Buffer:
        return super().buffer(tensor.clone())


class CopiesBack(TorchFramework):
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Any:
        return super().tensor(buffer, shape).clone()


class LeavesRubbish(TorchFramework):
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        found = super().allocate(count, dtype, memory)
        found.bytes()[-1:] = b"\x01"[: found.nbytes]
        return found


class ZeroesTooMuch(TorchFramework):
    def zero(self, buffer: Buffer) -> None:
        super().zero(Buffer(buffer.address, buffer.count and buffer.count + 1, buffer.dtype, buffer))


class MultipliesAllButOne(TorchFramework):
    def multiply(self, buffer: Buffer, factor: float) -> None:
        super().multiply(buffer.slice(0, buffer.count - 1), factor)


class AddsToTheSource(TorchFramework):
    def add(self, source: Buffer, target: Buffer) -> None:
        super().add(target, source)


class Truncates(TorchFramework):
    def convert(self, source: Buffer, target: Buffer) -> None:
        super().convert(source, target)
        self.multiply(target, 1 - 2**-9)


class HidesInfinity(TorchFramework):
    def norm(self, buffer: Buffer, order: float) -> float:
        return float(self.tensor(buffer, (buffer.count,)).nan_to_num().double().abs().pow(2).sum().sqrt())


class ClampsNan(TorchFramework):
    def clamp(self, buffer: Buffer, limit: float) -> None:
        super().clamp(buffer, limit)
        self.tensor(buffer, (buffer.count,)).nan_to_num_(limit)


class StoresNothing(TorchFramework):
    def store(self, tensor: Any, buffer: Buffer) -> None:
        pass


class ListsTiedTwice(TorchFramework):
    def parameters(self, model: Any) -> Mapping[str, Any]:
        return dict(model.named_parameters(remove_duplicate=False))


class ForgetsFrozenState(TorchFramework):
    def model_state(self, model: Any) -> Mapping[str, Any]:
        return {path: tensor for path, tensor in model.named_parameters() if tensor.requires_grad}


class TakesAnything(TorchFramework):
    def is_tensor(self, value: object) -> bool:
        return True


class Renamed(TorchFramework):
    name = "another"


class Suite(FrameworkConformance):
    framework = "torch"

    def __init__(self, adapter: Callable[[], Framework]) -> None:
        self._adapter = adapter
        self.set_up()

    def make(self) -> Framework:
        return self._adapter()


FAULTS: list[tuple[Callable[[], Framework], Callable[[Suite], None]]] = [
    (Renamed, Suite.test_it_has_the_name_under_which_it_is_registered),
    (TakesAnything, Suite.test_it_tells_tensors_and_models_from_other_objects),
    (Copies, Suite.test_a_buffer_is_the_memory_of_the_tensor),
    (CopiesBack, Suite.test_a_tensor_over_a_buffer_shares_its_memory),
    (LeavesRubbish, Suite.test_allocated_memory_is_zeroed),
    (ZeroesTooMuch, Suite.test_zero_clears_every_element_and_no_other),
    (MultipliesAllButOne, Suite.test_multiply_changes_every_element_and_no_other),
    (AddsToTheSource, Suite.test_add_adds_to_the_target_and_leaves_the_source),
    (Truncates, Suite.test_convert_rounds_to_the_targets_type),
    (HidesInfinity, Suite.test_norm_shows_what_is_not_finite),
    (ClampsNan, Suite.test_clamp_moves_what_is_outside_and_nothing_else),
    (StoresNothing, Suite.test_a_parameter_is_read_and_given_new_elements),
    (ListsTiedTwice, Suite.test_parameters_have_stable_paths_and_are_listed_once),
    (ForgetsFrozenState, Suite.test_the_state_of_a_model_is_all_that_must_be_equal_at_the_start),
]


@pytest.mark.parametrize(("adapter", "case"), FAULTS, ids=[adapter.__name__ for adapter, _ in FAULTS])  # type: ignore[attr-defined]  # they are classes
def test_a_fault_is_found(adapter: Callable[[], Framework], case: Callable[[Suite], None]) -> None:
    case(Suite(TorchFramework))
    with pytest.raises(AssertionError):
        case(Suite(adapter))

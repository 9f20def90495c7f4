"""The conformance suite of framework adapters: subclass it, name your framework, run pytest.

    from unidist.testing import FrameworkConformance

    class TestMyFramework(FrameworkConformance):
        framework = "mine"

It runs in this process, on host memory. The adapter's conformance module (`FrameworkSpec.conformance`) gives tensors
and a model, see `FrameworkSamples`. The contract is that of `unidist.framework`.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import pytest

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import UsageError
from unidist.framework import Framework, Tensor
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing.cases._arrays import Array, array_of, decode, encode

_TRAINED = ("inner", "head", "bias", "narrow")
_COUNT = 1001  # more than any vector register, and odd


class FrameworkSamples(Protocol):
    """The interface of an adapter's conformance module for this suite, besides `unidist.testing.FrameworkTraining`.

    Attributes:
        dtypes: the element types of the framework's tensors.
    """

    dtypes: Sequence[DType]

    def tensor(self, values: Array, dtype: DType) -> Tensor:
        """Return a new tensor of a type in host memory that holds these numbers, in the shape of the array."""

    def numbers(self, tensor: Tensor) -> Array:
        """Return a copy of what a tensor holds as an array; bfloat16 as float32."""

    def model(self) -> Any:
        """Return a new model, that of `FrameworkTraining`; its parameters' paths end in the names given there."""


class FrameworkConformance:
    """See the module's text. Each attribute may be replaced in a subclass.

    Attributes:
        framework: the framework's registered name.
    """

    framework: ClassVar[str] = ""

    def make(self) -> Framework:
        """Return the adapter; by default, the registered one."""
        return PluginManager().load().frameworks.get(self.framework).load()

    def gaps(self) -> Tensor | None:
        """Return a tensor whose memory has gaps; None where the framework has none."""
        return None

    @pytest.fixture(autouse=True)
    def _use_adapter(self) -> None:
        self.set_up()

    def set_up(self) -> None:
        """Make the adapter and its samples; called before each test."""
        spec = PluginManager().load().frameworks.get(self.framework)
        if not spec.conformance:
            raise ValueError(f"framework {self.framework!r} has no conformance module (FrameworkSpec.conformance)")
        self.samples: FrameworkSamples = cast(Any, importlib.import_module(spec.conformance))
        self.adapter = self.make()

    # What belongs to the framework

    def test_it_has_the_name_under_which_it_is_registered(self) -> None:
        assert self.adapter.name == self.framework

    def test_it_tells_tensors_and_models_from_other_objects(self) -> None:
        tensor, model = self.samples.tensor(np.zeros(3), DType.FLOAT32), self.samples.model()
        assert self.adapter.is_tensor(tensor)
        assert self.adapter.is_model(model)
        assert not self.adapter.is_tensor(model), "a model counts as a tensor"
        assert not self.adapter.is_model(tensor), "a tensor counts as a model"
        for other in (None, 1.5, "text", [1.0], object(), type(model), type(tensor)):
            assert not self.adapter.is_tensor(other), f"{other!r} counts as a tensor"
            assert not self.adapter.is_model(other), f"{other!r} counts as a model"

    def test_telling_objects_apart_imports_nothing(self) -> None:
        code = f"""
        import sys
        from unidist.runtime import PluginManager
        adapter = PluginManager().load().frameworks.get({self.framework!r}).load()
        before = set(sys.modules)
        assert not adapter.is_tensor([1.0]) and not adapter.is_model([1.0])
        print(*sorted(set(sys.modules) - before))
        """
        places = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stdout.split(), f"is_tensor and is_model have imported {done.stdout}"

    def test_models_of_others_are_not_its_own(self) -> None:
        for spec in PluginManager().load().frameworks:
            if spec.name != self.framework:
                assert not spec.load().is_model(self.samples.model()), f"{spec.name} takes it for its own"

    # Tensors and memory

    def test_the_type_of_a_tensor(self) -> None:
        for dtype in self.samples.dtypes:
            assert self.adapter.dtype(self.samples.tensor(np.ones(2), dtype)) is dtype

    def test_a_buffer_is_the_memory_of_the_tensor(self) -> None:
        for dtype in self.samples.dtypes:
            values = _values(dtype, 12).reshape(3, 4)
            tensor = self.samples.tensor(values, dtype)
            first, second = self.adapter.buffer(tensor), self.adapter.buffer(tensor)
            assert (first.count, first.dtype, first.memory) == (12, dtype, HOST)
            assert first.address == second.address, f"{dtype}: each buffer is elsewhere, so it is a copy"
            _check_equal(first, values.reshape(-1), f"the buffer of a {dtype} tensor")

    def test_a_buffer_keeps_its_memory_alive(self) -> None:
        buffers = [self.adapter.buffer(self.samples.tensor(np.full(_COUNT, i), DType.FLOAT64)) for i in range(20)]
        gc.collect()
        for number, buffer in enumerate(buffers):
            _check_equal(buffer, np.full(_COUNT, number, np.float64), "a buffer whose tensor was dropped")

    def test_tensors_of_no_element_and_of_no_dimension(self) -> None:
        assert self.adapter.buffer(self.samples.tensor(np.zeros((0, 3)), DType.FLOAT32)).count == 0
        buffer = self.adapter.buffer(self.samples.tensor(np.array(2.5), DType.FLOAT32))
        _check_equal(buffer, np.array([2.5], np.float32), "a scalar's buffer")
        assert self.samples.numbers(self.adapter.tensor(buffer, ())).shape == ()
        assert self.samples.numbers(self.adapter.tensor(self._allocate(0, DType.FLOAT32), (0, 3))).shape == (0, 3)

    def test_memory_with_gaps_is_refused(self) -> None:
        tensor = self.gaps()
        if tensor is None:
            pytest.skip(f"{self.framework} has no tensors with gaps in their memory")
        with pytest.raises(UsageError):
            self.adapter.buffer(tensor)

    def test_a_tensor_over_a_buffer_shares_its_memory(self) -> None:
        for dtype in self.samples.dtypes:
            buffer = self._allocate(12, dtype)
            tensor = self.adapter.tensor(buffer, (3, 4))
            assert self.adapter.is_tensor(tensor)
            assert self.adapter.dtype(tensor) is dtype
            self._fill(buffer, _values(dtype, 12))
            found = self.samples.numbers(tensor)
            assert found.shape == (3, 4)
            assert np.array_equal(found.reshape(-1), _values(dtype, 12)), f"a {dtype} tensor does not see a change"
            assert self.adapter.buffer(tensor).address == buffer.address, f"the tensor of a {dtype} buffer is a copy"

    def test_a_tensor_keeps_the_buffers_memory_alive(self) -> None:
        tensors = []
        for number in range(20):
            buffer = self._allocate(_COUNT, DType.FLOAT64)
            self._fill(buffer, np.full(_COUNT, number, np.float64))
            tensors.append(self.adapter.tensor(buffer, (_COUNT,)))
            del buffer
        gc.collect()
        for number, tensor in enumerate(tensors):
            assert (self.samples.numbers(tensor) == number).all(), "a tensor whose buffer was dropped has changed"

    def test_allocated_memory_is_zeroed(self) -> None:
        for dtype in self.samples.dtypes:
            for count in (0, 1, _COUNT):
                for _ in range(3):
                    buffer = self._allocate(count, dtype)
                    assert (buffer.count, buffer.dtype, buffer.memory) == (count, dtype, HOST)
                    assert not any(buffer.bytes()), f"{count} new elements of {dtype} are not all zeros"
                    buffer.bytes()[:] = b"\x01" * buffer.nbytes  # not to be seen in the next one

    # Arithmetic

    def test_zero_clears_every_element_and_no_other(self) -> None:
        for dtype in self.samples.dtypes:
            whole = self._filled(_values(dtype, _COUNT), dtype)
            self.adapter.zero(whole.slice(1, _COUNT - 2))
            expected = _values(dtype, _COUNT)
            expected[1:-1] = 0
            _check_equal(whole, expected, f"zero of {dtype}")
            self.adapter.zero(whole.slice(0, 0))

    def test_multiply_changes_every_element_and_no_other(self) -> None:
        for dtype in self._inexact():
            whole = self._filled(_values(dtype, _COUNT), dtype)
            self.adapter.multiply(whole.slice(1, _COUNT - 2), 0.25)
            expected = _values(dtype, _COUNT)
            expected[1:-1] *= 0.25
            _check_equal(whole, expected, f"multiply of {dtype}")

    def test_add_adds_to_the_target_and_leaves_the_source(self) -> None:
        for dtype in self.samples.dtypes:
            if dtype is DType.BOOL:
                continue
            source, target = (self._filled(_values(dtype, _COUNT, seed), dtype) for seed in (1, 2))
            self.adapter.add(source, target)
            _check_equal(source, _values(dtype, _COUNT, 1), f"the source of add of {dtype}")
            _check_equal(target, _values(dtype, _COUNT, 1) + _values(dtype, _COUNT, 2), f"add of {dtype}")

    def test_convert_rounds_to_the_targets_type(self) -> None:
        rng = np.random.default_rng(3)
        for source in self._floating():
            for target in self._floating():
                values = encode(rng.standard_normal(_COUNT), source)
                memory = self._allocate(_COUNT, target)
                self.adapter.convert(self._filled(decode(values, source), source), memory)
                expected = decode(encode(decode(values, source), target), target)
                _check_equal(memory, expected, f"convert from {source} to {target}")

    def test_convert_makes_what_is_too_large_infinite_and_keeps_what_is_not_finite(self) -> None:
        for source in self._floating():
            for target in self._floating():
                if source.itemsize < 4:
                    continue
                values = np.array([1e30, -1e30, math.inf, -math.inf, math.nan, 0.0])
                memory = self._allocate(6, target)
                self.adapter.convert(self._filled(values, source), memory)
                with np.errstate(over="ignore"):
                    expected = decode(encode(decode(encode(values, source), source), target), target)
                _check_equal(memory, expected, f"convert from {source} to {target}")

    def test_norm_of_every_order(self) -> None:
        for dtype in self._inexact():
            values = _values(dtype, _COUNT) / 8
            for order in (1.0, 2.0, 3.0, 0.5, math.inf):
                found = self.adapter.norm(self._filled(values, dtype), order)
                wanted = np.linalg.norm(values.astype(np.complex128 if dtype.is_complex else np.float64), order)
                limit = 1e-12 if dtype in (DType.FLOAT64, DType.COMPLEX128) else 1e-5
                assert isinstance(found, float)
                assert found == pytest.approx(wanted, rel=limit), f"norm of order {order} of {dtype}"

    def test_norm_does_not_overflow_on_the_way(self) -> None:
        for dtype, large in ((DType.FLOAT32, 1e30), (DType.FLOAT16, 6e4)):
            if dtype in self.samples.dtypes:
                found = self.adapter.norm(self._filled(np.full(5, large), dtype), 2.0)
                exact = float(decode(encode(np.array([large]), dtype), dtype)[0])
                assert found == pytest.approx(math.sqrt(5) * exact, rel=1e-5), f"norm of large {dtype} numbers"

    def test_norm_shows_what_is_not_finite(self) -> None:
        for dtype in self._floating():
            for order in (1.0, 2.0, math.inf):
                for bad, shows in ((math.inf, math.isinf), (-math.inf, math.isinf), (math.nan, math.isnan)):
                    values = np.ones(_COUNT)
                    values[700] = bad
                    found = self.adapter.norm(self._filled(values, dtype), order)
                    assert shows(found), f"the norm of order {order} of {dtype} numbers with {bad} is {found}"

    def test_clamp_moves_what_is_outside_and_nothing_else(self) -> None:
        for dtype in self._floating():
            buffer = self._filled(np.array([-3.0, -0.5, 0.25, 7.0, math.inf, -math.inf, math.nan, 0.0]), dtype)
            self.adapter.clamp(buffer, 1e30 if dtype.itemsize > 2 else 1e4)
            bound = 1e30 if dtype.itemsize > 2 else 1e4
            bound = float(decode(encode(np.array([bound]), dtype), dtype)[0])
            _check_equal(buffer, np.array([-3.0, -0.5, 0.25, 7.0, bound, -bound, math.nan, 0.0]), f"clamp of {dtype}")
            self.adapter.clamp(buffer, 0.5)
            _check_equal(buffer, np.array([-0.5, -0.5, 0.25, 0.5, 0.5, -0.5, math.nan, 0.0]), f"clamp of {dtype}")

    # Models

    def test_parameters_have_stable_paths_and_are_listed_once(self) -> None:
        model = self.samples.model()
        found = self.adapter.parameters(model)
        assert list(found) == list(self.adapter.parameters(model)), "the paths differ between two calls"
        names = [_last(path) for path in found]
        again = [_last(path) for path in self.adapter.parameters(self.samples.model())]
        assert names == again, "the paths of an equal model end in other names, or have another order"
        for name in _TRAINED:
            assert names.count(name) == 1, f"{name!r} is in {names} {names.count(name)} times"
        assert len({id(parameter) for parameter in found.values()}) == len(found), "a parameter is listed twice"

    def test_parameters_are_those_of_the_model(self) -> None:
        model = self.samples.model()
        first, second = self.adapter.parameters(model), self.adapter.parameters(model)
        for path, parameter in first.items():
            assert self.adapter.is_tensor(parameter)
            assert parameter is second[path], f"{path!r} is another object in each call"

    def test_a_parameter_is_read_and_given_new_elements(self) -> None:
        parameters = list(self.adapter.parameters(self.samples.model()).values())
        stored = []
        for number, parameter in enumerate(parameters):
            count, dtype = self.adapter.buffer(parameter).count, self.adapter.dtype(parameter)
            values = _values(dtype, count, number)
            try:
                self.adapter.store(parameter, self._filled(values, dtype))
            except UsageError:
                pytest.skip(f"parameters of {self.framework} do not change")
            stored.append(values)
        for parameter, values in zip(parameters, stored, strict=True):
            _check_equal(self.adapter.buffer(parameter), values, "a parameter that was given new elements")

    def test_the_state_of_a_model_is_all_that_must_be_equal_at_the_start(self) -> None:
        model = self.samples.model()
        state, parameters = self.adapter.model_state(model), self.adapter.parameters(model)
        assert parameters.keys() <= state.keys(), f"not in the state: {parameters.keys() - state.keys()}"
        missing = {*_TRAINED, "frozen", "unused", "empty"} - {_last(path) for path in state}
        assert not missing, f"not in the state: {missing}"
        for path, parameter in parameters.items():
            assert parameter is state[path]

    def _floating(self) -> list[DType]:
        return [dtype for dtype in self.samples.dtypes if dtype.is_floating]

    def _inexact(self) -> list[DType]:
        return [dtype for dtype in self.samples.dtypes if dtype.is_floating or dtype.is_complex]

    def _allocate(self, count: int, dtype: DType) -> Buffer:
        return self.adapter.allocate(count, dtype, HOST)

    def _filled(self, values: Array, dtype: DType) -> Buffer:
        buffer = self._allocate(len(values), dtype)
        self._fill(buffer, values)
        return buffer

    def _fill(self, buffer: Buffer, values: Array) -> None:
        array_of(buffer)[:] = encode(values, buffer.dtype)


def _values(dtype: DType, count: int, seed: int = 0) -> Array:
    """Return small numbers that every type has, and their sums and quarters too where it has fractions."""
    rng = np.random.default_rng([seed, count])
    values = rng.integers(0, 16, count).astype(np.float64)
    if dtype is DType.BOOL:
        return values > 7
    if dtype.is_floating or dtype.is_complex:
        values = 4 * (values - 8)
    exact: Array = decode(encode(values + 4j * rng.integers(0, 9, count) if dtype.is_complex else values, dtype), dtype)
    return exact


def _check_equal(buffer: Buffer, expected: Array, what: str) -> None:
    found = decode(array_of(buffer), buffer.dtype)
    wrong = ~(
        (found == expected) | (np.isnan(found) & np.isnan(expected)) if found.dtype.kind in "fc" else found == expected
    )
    if wrong.any():
        first = int(np.argmax(wrong))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {len(found)} elements are wrong; element {first} is {found[first]}, "
            f"expected {expected[first]}"
        )


def _last(path: str) -> str:
    return path.replace("/", ".").rpartition(".")[2]

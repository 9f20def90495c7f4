"""The program of a loss is cut into stages that together compute the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unidist.errors import ConfigurationError, UsageError

jax = pytest.importorskip("jax", reason="programs of JAX are cut")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there

from unidist_jax.models import evaluate  # noqa: E402 - it needs JAX
from unidist_pipeline._jax.division import Division, StageProgram  # noqa: E402 - it needs JAX
from unidist_pipeline._jax.program import Program, traced  # noqa: E402

WIDTH, COUNT = 6, 4
X = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)


def kernels(count: int = COUNT) -> dict[str, Any]:
    return {f"layer{place}/kernel": jnp.full((WIDTH, WIDTH), 0.1 + 0.01 * place) for place in range(count)}


def program_of(function: Any, leaves: dict[str, Any], *batch: Any) -> Program:
    types = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    return traced(lambda given, batch: function(dict(zip(leaves, given, strict=True)), *batch), types, batch)


def computed(program: Program, stages: Sequence[StageProgram], leaves: dict[str, Any], *batch: Any) -> Any:
    """Return the loss that the stages compute, each from what it may use alone."""
    passed: dict[Any, Any] = {}
    for stage in stages:
        own = {program.parameters[place]: list(leaves.values())[place] for place in stage.places}
        forms = {**program.constants, **own}
        evaluate(stage.form_equations, forms)
        values = {**program.constants, **dict(zip(program.inputs, batch, strict=True))}
        values.update({variable: forms[variable] for variable in stage.weights})
        values.update({variable: passed[variable] for variable in stage.taken})
        evaluate(stage.equations, values)
        passed = {variable: values[variable] for variable in stage.made}
    return passed[program.loss]


def layers(params: Any, x: Any) -> Any:
    for kernel in params.values():
        x = jnp.tanh(x @ kernel)
    return x.mean()


def test_stages_have_about_equal_numbers_of_parameters() -> None:
    program = program_of(layers, kernels(), X)
    division = Division(program)
    markers = division.balanced(2)
    stages = division.stages(markers)
    assert markers == [2]
    assert [stage.places for stage in stages] == [[0, 1], [2, 3]]
    assert [len(stage.taken) for stage in stages] == [0, 1]
    np.testing.assert_allclose(computed(program, stages, kernels(), X), layers(kernels(), X), rtol=1e-6)


def test_a_cut_is_where_little_passes() -> None:
    def residual(params: Any, x: Any) -> Any:
        for kernel in params.values():
            x = x + jnp.tanh(x @ kernel) * 2.0
        return x.mean()

    stages = Division(program_of(residual, kernels(), X)).stages([1, 2, 3])
    assert [len(stage.taken) for stage in stages] == [0, 1, 1, 1]


def test_what_skips_stages_goes_through_them() -> None:
    def skipping(params: Any, x: Any) -> Any:
        first, *others = params.values()
        kept = x = jnp.tanh(x @ first)
        mask = x > 0
        for kernel in others:
            x = jnp.tanh(x @ kernel)
        return jnp.where(mask, x, kept).mean()

    program = program_of(skipping, kernels(), X)
    stages = Division(program).stages([1, 2, 3])
    assert [len(stage.taken) for stage in stages] == [0, 1, 3, 3]  # the mask is made by the second
    np.testing.assert_allclose(computed(program, stages, kernels(), X), skipping(kernels(), X), rtol=1e-6)


def test_what_comes_of_the_batch_alone_is_computed_where_it_is_used() -> None:
    def masked(params: Any, x: Any) -> Any:
        mask = x > 0
        for kernel in params.values():
            x = jnp.where(mask, x @ kernel, 0.0)
        return x.mean()

    program = program_of(masked, kernels(), X)
    stages = Division(program).stages([2])
    assert [len(stage.taken) for stage in stages] == [0, 1]
    assert all(any(each.primitive.name == "gt" for each in stage.equations) for stage in stages)
    np.testing.assert_allclose(computed(program, stages, kernels(), X), masked(kernels(), X), rtol=1e-6)


def test_a_tied_parameter_is_of_both_stages_and_its_transpose_is_computed_there() -> None:
    def tied(params: Any, x: Any) -> Any:
        first, second = params.values()
        return (jnp.tanh(jnp.tanh(x @ first) @ second) @ first.T).mean()

    program = program_of(tied, kernels(2), X)
    stages = Division(program).stages([1])
    assert [stage.places for stage in stages] == [[0], [0, 1]]
    assert [each.primitive.name for each in stages[1].form_equations] == ["transpose"]
    np.testing.assert_allclose(computed(program, stages, kernels(2), X), tied(kernels(2), X), rtol=1e-6)


def test_a_penalty_is_computed_where_its_parameters_are() -> None:
    def penalized(params: Any, x: Any) -> Any:
        return layers(params, x) + sum((kernel**2).sum() for kernel in params.values())

    program = program_of(penalized, kernels(), X)
    stages = Division(program).stages([2])
    assert [stage.places for stage in stages] == [[0, 1], [2, 3]]
    np.testing.assert_allclose(computed(program, stages, kernels(), X), penalized(kernels(), X), rtol=1e-6)


def test_parameters_made_of_several_are_computed_in_one_stage() -> None:
    def normalized(params: Any, x: Any) -> Any:
        first, second, *others = params.values()
        for kernel in (first * second / jnp.linalg.norm(second), *others):
            x = x @ kernel
        return x.mean()

    program = program_of(normalized, kernels(), X)
    stages = Division(program).stages([2, 3])
    assert [stage.places for stage in stages] == [[0, 1], [2], [3]]
    np.testing.assert_allclose(computed(program, stages, kernels(), X), normalized(kernels(), X), rtol=1e-6)


def test_markers_cut_the_program_of_another_batch_alike() -> None:
    for rows in (1, 3):
        program = program_of(layers, kernels(), X[:rows])
        stages = Division(program).stages([1, 3])
        assert [stage.places for stage in stages] == [[0], [1, 2], [3]]
        np.testing.assert_allclose(computed(program, stages, kernels(), X[:rows]), layers(kernels(), X[:rows]), 1e-6)


def test_names_say_where_stages_begin() -> None:
    division = Division(program_of(layers, kernels(), X))
    assert division.named(["layer1", "layer3.kernel"], 3) == [1, 3]
    with pytest.raises(ConfigurationError, match="names 1 places at which a stage begins"):
        division.named(["layer1"], 3)
    with pytest.raises(ConfigurationError, match=r"no parameter .* under 'layer'.* layer0, layer1"):
        division.named(["layer"], 2)
    with pytest.raises(ConfigurationError, match="one after the other"):
        division.stages([3, 1])


def test_a_loop_of_jax_is_not_cut() -> None:
    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, params["stack"])[0].mean()

    division = Division(program_of(scanned, {"stack": jnp.ones((3, WIDTH, WIDTH))}, X))
    with pytest.raises(ConfigurationError, match=r"no more than 1\. A lax\.scan over layers is one operation"):
        division.balanced(2)


def test_a_loss_of_parameters_alone_is_refused() -> None:
    for function in (lambda params, x: 1.0, lambda params, x: params["layer0/kernel"].sum(), lambda params, x: x.sum()):
        with pytest.raises(UsageError, match="must depend on parameters and on the batch"):
            Division(program_of(function, kernels(), X))

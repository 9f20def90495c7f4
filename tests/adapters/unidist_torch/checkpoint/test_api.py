"""Checkpoints of torch models and optimizers, in one process: what is saved, what is loaded, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import unidist.torch as ud  # noqa: E402 - after the check for torch
from unidist.checkpoint.format.index import Index  # noqa: E402
from unidist.checkpoint.format.interface import PlacesParameters  # noqa: E402
from unidist.checkpoint.format.pieces import Placement  # noqa: E402
from unidist.errors import CheckpointError, UsageError  # noqa: E402


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small, and the machine may be busy
    ud.init()
    yield
    ud.shutdown()
    torch.set_num_threads(threads)


class Net(torch.nn.Module):
    """Tied weights, buffers that are saved or not, channels_last memory, an empty parameter, a 16-bit type."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(4)
        self.inner = torch.nn.Linear(4, 4)
        self.outer = torch.nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.narrow = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.empty = torch.nn.Parameter(torch.zeros(0, 2))
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return something that depends on every parameter."""
        hidden = self.norm(self.convolution(image).mean((2, 3)))
        return self.outer(torch.tanh(self.inner(hidden))).sum() * self.scalar + self.narrow.float().sum()


def make(seed: int, kind: Callable[..., Any], **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(seed)
    model = Net()
    first, *rest = [parameter for parameter in model.parameters() if parameter.numel()]
    return model, kind([{"params": [first]}, {"params": rest, "lr": 0.02}], lr=0.01, **options)


def train(model: Net, optimizer: Any, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 2, 6, 6, generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("NAdam", {}),
    ("Adagrad", {}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("bound", [False, True])
def test_training_goes_on_bit_by_bit(tmp_path: Path, kind: str, options: dict[str, Any], bound: bool) -> None:
    model, optimizer = make(0, getattr(torch.optim, kind), **options)
    if bound:
        model, optimizer = ud.distribute(model, optimizer)
    train(model, optimizer, 3, seed=1)
    optimizer.param_groups[0]["lr"] = 0.005  # as a scheduler does
    ud.save(tmp_path / "c", model, optimizer)
    expected = train(model, optimizer, 3, seed=2)

    again, other = make(7, getattr(torch.optim, kind), **options)
    assert train(again, other, 1, seed=2) != expected[:1]
    ud.load(tmp_path / "c", again, other)
    assert other.param_groups[0]["lr"] == 0.005
    assert train(again, other, 3, seed=2) == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_scalars_of_an_optimizer_keep_their_type_beside_parameters_of_another(tmp_path: Path) -> None:
    """NAdam multiplies in torch's default type, whatever that of the parameter; `load_state_dict` would change it."""
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    ud.save(tmp_path / "c", model, optimizer)
    other = torch.optim.NAdam(model.parameters())
    ud.load(tmp_path / "c", model, other)
    for parameter in model.parameters():
        assert optimizer.state[parameter].keys() == other.state[parameter].keys()
        for name, value in optimizer.state[parameter].items():
            assert (other.state[parameter][name].dtype, other.state[parameter][name].tolist()) == (
                value.dtype,
                value.tolist(),
            ), name


def test_what_torch_compile_wraps_has_the_paths_of_the_model(tmp_path: Path) -> None:
    model, optimizer = make(0, torch.optim.AdamW)
    train(model, optimizer, 2, seed=0)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.inner = torch.compile(model.inner, backend="eager")
    ud.save(tmp_path / "c", torch.compile(model, backend="eager"), optimizer)
    other, other_optimizer = make(1, torch.optim.AdamW)
    ud.load(tmp_path / "c", other, other_optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert train(other, other_optimizer, 2, seed=1) == train(model, optimizer, 2, seed=1)
    ud.save(tmp_path / "plain", other, other_optimizer)
    ud.load(tmp_path / "plain", torch.compile(model, backend="eager"), optimizer)
    assert train(other, other_optimizer, 2, seed=2) == train(model, optimizer, 2, seed=2)


def test_a_save_before_the_first_step_changes_nothing_and_loads(tmp_path: Path) -> None:
    model, optimizer = make(0, torch.optim.Adam)
    plain, plain_optimizer = make(0, torch.optim.Adam)
    ud.save(tmp_path / "c", model, optimizer)
    assert not optimizer.state
    assert not Index.read(tmp_path / "c").sections["optimizer"].tensors
    expected = train(plain, plain_optimizer, 2, seed=1)
    assert train(model, optimizer, 2, seed=1) == expected
    ud.load(tmp_path / "c", model, optimizer)  # back to before the first step
    assert not optimizer.state
    assert train(model, optimizer, 2, seed=1) == expected


def test_what_is_shared_is_saved_once_and_what_does_not_persist_not_at_all(tmp_path: Path) -> None:
    model, _ = make(0, torch.optim.Adam)
    ud.save(tmp_path / "c", model)
    names = Index.read(tmp_path / "c").sections["model"].tensors.keys()
    assert "inner.weight" in names
    assert "outer.weight" not in names
    assert "scratch" not in names
    assert "norm.num_batches_tracked" in names


def test_extra_values_and_tensors_come_back(tmp_path: Path) -> None:
    extra = {"epoch": 3, "mean": torch.arange(3.0), "nested": {"list": [1, torch.ones(2, dtype=torch.bfloat16), None]}}
    ud.save(tmp_path / "run", extra=extra, step=12)
    loaded = ud.load(tmp_path / "run")
    assert loaded.step == 12
    assert loaded.path == tmp_path / "run" / "step-00000012"
    assert loaded.extra["epoch"] == 3
    assert torch.equal(loaded.extra["mean"], torch.arange(3.0))
    assert loaded.extra["nested"]["list"][0] == 1
    assert loaded.extra["nested"]["list"][1].dtype is torch.bfloat16
    assert loaded.facts["world_size"] == 1


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    import random

    import numpy as np

    ud.save(tmp_path / "c", rng=True)
    expected = (torch.randn(3).tolist(), random.random(), np.random.rand())
    torch.randn(5), random.random(), np.random.rand()
    ud.load(tmp_path / "c", rng=True)
    assert (torch.randn(3).tolist(), random.random(), np.random.rand()) == expected


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    ud.save(tmp_path / "c", torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        ud.load(tmp_path / "c", other)
    message = str(caught.value)
    assert "it lacks (2): '2.weight' float32[2, 5]; '2.bias' float32[2]" in message
    assert "it has what is not wanted (2): '1.bias' float32[2]; '1.weight' float32[2, 4]" in message
    assert "'0.weight' float32[4, 3], here [5, 3]" in message
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_without_strict_what_both_have_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    ud.save(tmp_path / "c", saved)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    ud.load(tmp_path / "c", other, strict=False)
    assert torch.equal(other[0].weight, saved[0].weight)
    assert "it lacks (2)" in caplog.text


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(0, torch.optim.Adam)
    train(model, optimizer, 1, seed=0)
    ud.save(tmp_path / "c", model, optimizer)
    _, other = make(0, torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"saved by Adam \(torch\), and SGD \(torch\) cannot go on with it"):
        ud.load(tmp_path / "c", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="none of the models'"):
        ud.load(tmp_path / "c", model, other)


def test_the_number_of_updates_and_the_scale_of_the_loss_come_back(tmp_path: Path) -> None:
    def bound() -> tuple[Net, Any]:
        torch.manual_seed(0)
        model = Net()
        rest = [parameter for parameter in model.parameters() if parameter.numel()]
        return ud.distribute(model, torch.optim.SGD(rest, lr=0.01), strategy="precision=fp16")

    model, optimizer = bound()
    train(model, optimizer, 2, seed=1)
    scaler = optimizer._unidist._update.scaler
    scaler.scale = 2048.0
    ud.save(tmp_path / "c", model, optimizer)
    other, its_optimizer = bound()
    ud.load(tmp_path / "c", other, its_optimizer)
    update = its_optimizer._unidist._update
    assert (update.step, update.scaler.state()) == (2, scaler.state())


def test_several_models_and_optimizers_have_names(tmp_path: Path) -> None:
    models = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 3)}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    for name, model in models.items():
        model(torch.ones(2)).sum().backward()
        optimizers[name].step()
    ud.save(tmp_path / "c", models, optimizers)
    sections = Index.read(tmp_path / "c").sections
    assert sorted(sections) == ["extra", "model.a", "model.b", "optimizer.a", "optimizer.b"]
    others = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 3)}
    other_optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in others.items()}
    ud.load(tmp_path / "c", others, other_optimizers)
    assert torch.equal(others["b"].weight, models["b"].weight)
    first, second = optimizers["b"].state[models["b"].weight], other_optimizers["b"].state[others["b"].weight]
    assert torch.equal(first["exp_avg_sq"], second["exp_avg_sq"])
    assert torch.equal(first["step"], second["step"])


def test_a_mapping_renames_and_turns(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(saved.parameters())
    saved(torch.ones(3)).sum().backward()
    optimizer.step()
    ud.save(tmp_path / "c", saved, optimizer)
    (tmp_path / "map.yaml").write_text("kernel: {from: weight, permute: [1, 0]}\nbias: bias\n", encoding="utf-8")

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = torch.nn.Parameter(torch.zeros(3, 2))
            self.bias = torch.nn.Parameter(torch.zeros(2))

    turned = Turned()
    other = torch.optim.Adam(turned.parameters())
    ud.load(tmp_path / "c", turned, other, mapping=tmp_path / "map.yaml")
    assert torch.equal(turned.kernel, saved.weight.T)
    assert torch.equal(other.state[turned.kernel]["exp_avg"], optimizer.state[saved.weight]["exp_avg"].T)
    assert other.state[turned.kernel]["step"] == 1


def test_a_model_that_is_cut_says_where_its_parameters_belong(tmp_path: Path) -> None:
    """As tensor parallelism does: two halves, loaded one after another from a whole one."""
    whole = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(whole.parameters())
    whole(torch.ones(3)).sum().backward()
    optimizer.step()
    ud.save(tmp_path / "c", whole, optimizer)

    class Half(PlacesParameters):
        def __init__(self, number: int) -> None:
            self.number = number

        def placement(self, path: str, shape: Any, dtype: Any) -> Placement:
            assert path in ("weight", "bias")  # of its own model, also where there are several
            rows = (2 * self.number, 2 * self.number + 2)
            return Placement(path, (4, *shape[1:]), (rows, *((0, size) for size in shape[1:])))

    for number in range(2):
        half = torch.nn.Linear(3, 2)
        half._unidist = Half(number)
        half_optimizer = torch.optim.Adam(half.parameters())
        ud.load(tmp_path / "c", half, half_optimizer)
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(half.weight, whole.weight[rows])
        assert torch.equal(half.bias, whole.bias[rows])
        expected = optimizer.state[whole.weight]["exp_avg"][rows]
        assert torch.equal(half_optimizer.state[half.weight]["exp_avg"], expected)
    other = torch.nn.Linear(3, 4)
    optimizer.add_param_group({"params": list(other.parameters())})
    ud.save(tmp_path / "several", {"cut": whole, "other": other}, optimizer)
    half_optimizer.add_param_group({"params": list(other.parameters())})
    half_optimizer.state[half.weight]["exp_avg"].zero_()
    ud.load(tmp_path / "several", {"cut": half, "other": other}, half_optimizer)
    assert torch.equal(half_optimizer.state[half.weight]["exp_avg"], expected)


def test_an_asynchronous_save_is_complete_at_shutdown(tmp_path: Path) -> None:
    model, optimizer = make(0, torch.optim.Adam)
    train(model, optimizer, 1, seed=0)
    expected = model.inner.weight.clone()
    ud.save(tmp_path / "c", model, optimizer, asynchronous=True)
    with torch.no_grad():
        model.inner.weight.zero_()
    ud.shutdown()
    ud.init()
    ud.load(tmp_path / "c", model, optimizer)
    assert torch.equal(model.inner.weight, expected)


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=3 without step="):
        ud.save(tmp_path / "c", keep=3)
    with pytest.raises(UsageError, match="Linear is no optimizer of PyTorch"):
        ud.save(tmp_path / "c", optimizer=torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="int is no model of torch"):
        ud.save(tmp_path / "c", 3)
    with pytest.raises(UsageError, match="LBFGS"):
        ud.save(tmp_path / "c", optimizer=torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]))

"""A model that uses one layer in several places (ALBERT, Universal Transformers): all paths are one layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError
from unidist.testing.fixtures import RankPoolFactory

torch = pytest.importorskip("torch")

from unidist_tensor_parallel._torch.tracing import feeds_of, places_of  # noqa: E402

WIDTH = 8


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def block() -> Any:
    class Block(torch.nn.Module):  # type: ignore[name-defined,misc]  # torch is imported if it is there
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            for name in "qkvo":
                setattr(self, name, torch.nn.Linear(WIDTH, WIDTH))
            self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            samples, tokens, _ = x.shape
            heads = (each(x).view(samples, tokens, -1, 2).transpose(1, 2) for each in (self.q, self.k, self.v))
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
            x = x + self.o(mixed.reshape(samples, tokens, -1))
            return x + self.down(torch.relu(self.up(x)))

    return Block()


def network(order: str) -> Any:
    """Return blocks in a list; equal letters are one object."""
    torch.manual_seed(0)
    blocks = {letter: block() for letter in sorted(set(order))}
    return torch.nn.Sequential(*(blocks[letter] for letter in order))


def trained(order: str, options: str) -> tuple[float, int, str]:
    """Train on the ranks and in one process; return how far outputs differ, how many parameters are cut, the error."""
    import unidist.torch as ud
    from unidist.settings.environment import set_variables

    def steps(model: Any, optimizer: Any) -> Any:
        x = torch.linspace(-1, 1, 2 * 4 * WIDTH).reshape(2, 4, WIDTH)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model(x).detach()

    whole = network(order)
    model = copy.deepcopy(whole)
    expected = steps(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    with set_variables({"UNIDIST_STRATEGY": f"tensor=2{options}", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ConfigurationError as exc:
            return 0.0, 0, str(exc)
        else:
            found = steps(model, optimizer)
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            return float((found - expected).abs().max()), sum(a.shape != b.shape for a, b in pairs), ""
        finally:
            ud.shutdown()


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("order", "options", "num_cut"),
    [
        ("aaa", "", 10),
        ("aba", "", 20),
        ("aaa", ":sequence=true", 10),
        ("aaa", ":plan=1.up=column+2.down=row", 3),
    ],
)
def test_a_layer_in_several_places_is_cut_once(
    rank_pool: RankPoolFactory, order: str, options: str, num_cut: int
) -> None:
    for difference, cut, error in rank_pool(2).run(trained, (order, options)):
        assert error == ""
        assert difference < 1e-5
        assert cut == num_cut


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("order", "options", "message"),
    [
        ("aaa", ":plan=0.up=column+1.up=column_gather", "'0.up' (column) and '1.up' (column_gather) are one layer"),
        ("aba", ":sequence=true", "'0' is used in several places, beside other blocks"),
    ],
)
def test_what_cannot_be_said_of_one_layer_is_an_error(
    rank_pool: RankPoolFactory, order: str, options: str, message: str
) -> None:
    for _, _, error in rank_pool(2).run(trained, (order, options)):
        assert message in error


def test_a_layer_has_the_users_of_all_its_places() -> None:
    class Parts(torch.nn.Module):  # type: ignore[name-defined,misc]  # likewise
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()
            self.b.up = self.a.up

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x)) if float(x.sum()) else x  # which cannot be traced as a whole

    model = Parts()
    assert ["a.up", "b.up"] in places_of(model)
    assert feeds_of(model)["a.up"] == ("a.down", "b.down")
    assert "b.up" not in feeds_of(model)

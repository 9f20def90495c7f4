"""The GPU of a rank under JAX."""

from __future__ import annotations

import jax
import pytest

from unidist.errors import ConfigurationError
from unidist.topology import Topology
from unidist_jax.basics import choose_device


@pytest.mark.parametrize(
    ("platforms", "before", "visible", "local_size", "after"),
    [
        (None, "all", 4, 2, "1"),
        ("cuda,cpu", "all", 4, 2, "1"),
        ("cpu", "all", 1, 2, "all"),  # trains on the CPU
        (None, "3", 4, 2, "3"),  # the script has chosen
        (None, "all", 2, 1, "all"),  # a process that has its host for itself
        (None, "all", 0, 2, "all"),
        (None, "all", 1, 2, None),
    ],
)
def test_a_rank_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch,
    platforms: str | None,
    before: str,
    visible: int,
    local_size: int,
    after: str | None,
) -> None:
    values = {"jax_platforms": platforms, "jax_cuda_visible_devices": before}
    monkeypatch.setattr("unidist_jax.basics._has_plugin_for_gpus", lambda: True)
    monkeypatch.setattr(type(jax.config), "jax_platforms", property(lambda config: values["jax_platforms"]))
    monkeypatch.setattr(type(jax.config), "read", lambda config, name: values[name])
    monkeypatch.setattr(type(jax.config), "update", lambda config, name, value: values.update({name: value}))
    place = Topology(local_size - 1, local_size, local_size - 1, local_size)
    if after is None:
        with pytest.raises(ConfigurationError, match=r"rank 1 sees 1 CUDA device.* runs 2 ranks"):
            choose_device(place, visible=visible)
    else:
        assert choose_device(place, visible=visible) is (visible > 0 and platforms != "cpu")
        assert values["jax_cuda_visible_devices"] == after


def test_without_its_plugin_jax_computes_on_the_cpu() -> None:
    assert choose_device(Topology(0, 1, 0, 1), visible=1) is False

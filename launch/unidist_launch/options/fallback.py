"""The option `--fallback-strategy`: which numbers of ranks another strategy fits."""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist.launcher import Fallback
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.elastic_support import check_plan
from unidist.strategy.interface import NamesPlugins
from unidist.strategy.plan import build, make_plan


def read_fallback(line: str, max_num: int, manager: PluginManager) -> Fallback:
    """Return the fallback that a strategy line asks for. Pure.

    Args:
        line: of strategies, as for `--strategy`.
        max_num: the most ranks of the job.
        manager: loaded plugins.

    Raises:
        ConfigurationError: the strategies are not known, cannot be in an elastic job, or fit no number of ranks.
    """
    strategies = build(line, manager.strategies)
    meshes, error = {}, None
    for num in range(1, max_num + 1):
        try:
            plan = make_plan(strategies, num, manager.strategies)
            check_plan(plan)
        except ConfigurationError as exc:
            error = exc
            continue
        meshes[num] = plan.mesh
    if not meshes:
        raise ConfigurationError(f"--fallback-strategy {line}: it fits no number of ranks up to {max_num}: {error}")
    for strategy in strategies:
        if isinstance(strategy, NamesPlugins):
            strategy.check_plugins(manager)
    return Fallback(line, meshes)

"""What a script looks for first is in the module of every framework, under one name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

NAMES = """
Adasum Average Compression DistributedOptimizer Max Min ProcessSet Product Sum TrainStep add_process_set allgather
allgather_object allreduce alltoall barrier broadcast broadcast_object data_rank data_size device distribute elastic
gather_samples global_process_set init is_initialized join load local_rank local_size rank reducescatter
remove_process_set report role save seed shard shutdown size start_timeline stop_timeline world
"""


@pytest.mark.parametrize("facade", ["torch", "tensorflow", "keras", "jax"])
def test_each_module_has_them(facade: str) -> None:
    path = Path(__file__).parents[1] / "unidist" / facade / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert set(ast.literal_eval(node.value)) >= set(NAMES.split())
            return
    raise AssertionError(f"unidist.{facade} has no __all__")

"""Where named operations run, and names for those that were given none."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from unidist.errors import NotInitializedError, UsageError
from unidist.horovod_api.scope import Scope, scope_of
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context


def test_a_scope_belongs_to_one_runtime() -> None:
    with pytest.raises(NotInitializedError):
        scope_of(global_process_set)
    scopes = []
    for _ in range(2):
        context.init()
        try:
            scope = scope_of(global_process_set)
            assert scope is scope_of(global_process_set)
            assert [scope.name("sum", None), scope.name("sum", None), scope.name("max", None)] == [
                "sum.noname.1", "sum.noname.2", "max.noname.1",
            ]  # fmt: skip
            assert scope.name("sum", "mine") == "mine"
            with pytest.raises(UsageError, match="not registered"):
                scope_of(ProcessSet([0]))
        finally:
            context.shutdown()
        scopes.append(scope)
    assert scopes[0] is not scopes[1]


def test_scopes_keep_no_runtime_that_has_ended() -> None:
    context.init()
    try:
        scope_of(global_process_set)
        runtime = weakref.ref(context.current())
    finally:
        context.shutdown()
    gc.collect()
    assert runtime() is None, "and the models and optimizers that it knows"


def test_a_forked_child_has_no_scope() -> None:
    context.init()
    try:
        scope_of(global_process_set)
        child = os.fork()
        if not child:
            try:
                scope_of(global_process_set)
            except NotInitializedError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        scope_of(global_process_set)
    finally:
        context.shutdown()


def test_roots_are_given_as_world_ranks() -> None:
    context.init()
    try:
        operations = context.current().negotiator
        assert Scope(operations, [2, 5, 7]).root(5) == 1
        with pytest.raises(UsageError, match=r"choices: 2, 5, 7"):
            Scope(operations, [2, 5, 7]).root(1)
        with pytest.raises(UsageError, match=r"choices: 0 to 2"):
            Scope(operations, [0, 1, 2]).root(3)
    finally:
        context.shutdown()

"""JAX on ranks that come and go: nothing is traced again, and the parameters are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_job import ElasticJob

pytestmark = pytest.mark.parallel

ENVIRONMENT = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "UNIDIST_TIMEOUT_SEC": "60"}

# Every rank takes the same 6 samples whichever ranks there are, so a mean that counted lost ranks would show. In step 4
# it waits until all ranks are there again, and while there is a file `hold`. Lines "traced" say how often the functions
# were traced in this process.
SCRIPT = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import unidist.jax as ud

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
wanted, how = int(sys.argv[1]), sys.argv[2]
worker = int(os.environ.get("UNIDIST_WORKER", 0))
traced = []

def loss_fn(params, x):
    traced.append("loss")
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    if how == "operations":
        hidden = ud.allreduce(hidden, name="hidden")
    return jnp.mean((hidden @ params["v"] - jnp.sin(x).sum(1)) ** 2)

generator = np.random.default_rng(3 if worker == 0 else 4)
params = {"w": jnp.asarray(generator.standard_normal((4, 5))), "b": jnp.zeros(5), "v": jnp.ones(5)}
params, optimizer = ud.distribute(params, optax.adamw(0.05))

def update(params, opt_state, x):
    traced.append("update")
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, ud.allreduce(loss, name="loss")

step = jax.jit(update, donate_argnums=(0, 1))
state = ud.elastic.JaxState(params=params, opt_state=optimizer.init(params), optimizer=optimizer, step=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(ud.size())])

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.step, os.getpid())
    while state.step < 10:
        while state.step == 4 and (ud.size() < wanted or os.path.exists("hold")):
            state.check_host_updates()
            time.sleep(0.01)
        if worker == 1 and state.step == 2 and how == "within":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)  # the others wait within their compiled step
        x = np.random.default_rng(100 + state.step).standard_normal((6, 4))
        state.params, state.opt_state, _ = step(state.params, state.opt_state, x)
        state.step += 1
        state.commit()
        say("step", state.step, ud.rank())
        time.sleep(0.1)

train(state)
say("done", ";".join(repr(float(leaf.sum())) for leaf in jax.tree.leaves(state.params)), state.step, os.getpid())
say("traced", os.getpid(), len(traced), step._cache_size())
say("resets", resets)
"""


def parameters(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


def undisturbed(folder: Path, how: str) -> list[float]:
    """Return what one process computes that nothing happens to."""
    done = subprocess.run(
        [sys.executable, "script.py", "1", "data" if how == "within" else how],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("done ")]
    return parameters(line.split()[1])


@pytest.mark.parametrize(
    ("how", "victim", "strategy"),
    [
        ("within", None, "data"),
        ("between", 0, "data"),
        ("within", None, "zero=1"),
        pytest.param("operations", 1, "data", marks=pytest.mark.soak),
        pytest.param("between", 2, "data", marks=pytest.mark.soak),
        pytest.param("between", 0, "zero=2", marks=pytest.mark.soak),
        pytest.param("between", 1, "zero=1:whole=true", marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_is_replaced_and_the_others_compile_nothing_again(
    how: str, victim: int | None, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["-np", "3", "--min-np", "1", "--strategy", strategy]
    if victim is not None:
        (tmp_path / "hold").touch()
    with ElasticJob.start(tmp_path, options, ["script.py", "3", how], ENVIRONMENT) as job:
        pids = {job.pid(rank, 3) for rank in range(3)}
        killed = set[int]()
        if victim is not None:
            killed = {job.pid(victim, 3)}
            job.wait_for(r"step 2 \d")
            os.kill(killed.copy().pop(), signal.SIGKILL)
            (tmp_path / "hold").unlink()
        assert job.end(seconds=300) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == 3
    expected = undisturbed(tmp_path, how)
    for result in results:
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert [event["world_size"] for event in job.events("generation")] == [3, 2, 3]
    survivors = pids & job.survivors()
    assert len(survivors) == 2
    assert not survivors & killed
    for pid, count, programs in job.said(r"traced (\d+) (\d+) (\d+)"):
        if int(pid) in survivors and strategy == "data":  # once "update", once "loss", in one program
            assert (int(count), int(programs)) == (2, 1), job.lines
    assert job.said(r"resets (.*)").count((str([2, 3]),)) == 2


REFUSED = """
import jax, jax.numpy as jnp
import unidist.jax as ud
ud.init()
try:
    jax.jit(ud.allreduce)(jnp.ones(2))
except Exception as exc:
    print(type(exc).__name__, exc, flush=True)
"""


def test_a_traced_operation_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    with ElasticJob.start(tmp_path, ["-np", "1", "--min-np", "1"], ["script.py"], ENVIRONMENT) as job:
        assert job.end(seconds=120) == 0, job.lines
    assert job.said("OperationError allreduce without a name within a compiled function, in an elastic job.*")


@pytest.mark.soak
def test_a_shard_that_no_state_keeps_is_an_error_after_the_first_change(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("optimizer=optimizer, ", ""))
    options = ["-np", "3", "--min-np", "1", "--strategy", "zero=1:whole=true"]
    with ElasticJob.start(tmp_path, options, ["script.py", "3", "within"], ENVIRONMENT) as job:
        assert job.end(seconds=300) != 0
    assert any("was not taken along" in line or "do not agree" in line for line in job.lines), job.lines
    assert not job.said("done .*")

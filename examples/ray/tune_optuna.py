"""Finds a learning rate with Optuna, each trial on several ranks; trials that do badly are pruned.

    python examples/ray/tune_optuna.py               # trials one after another, by unidist.run
    python examples/ray/tune_optuna.py --tune        # trials of Ray Tune, each with a RayExecutor of its own

Ranks report through rank 0 alone. When a trial is pruned, its ranks end with it.
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch

import unidist
import unidist.torch as ud

NUM_STEPS = 20


class Pruned(Exception):
    """The trial is not worth going on with."""


def train(rate: float, report: Any = None) -> float:
    """Fit a line to points on this rank and return the loss; `report(step, loss)` says whether to stop."""
    ud.init()
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=rate))
    part = slice(ud.data_rank(), None, ud.data_size())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[part]), targets[part])
        loss.backward()
        optimizer.step()
        mean = ud.allreduce(loss.detach(), name="loss").item()
        stop = report(step, mean) if report is not None and ud.rank() == 0 else False
        if ud.broadcast_object(stop, root_rank=0, name="stop"):  # all ranks leave together
            raise Pruned(f"loss {mean:.3f} after {step + 1} steps")
    return mean


def stop_if_bad(step: int, loss: float, *, limit: float) -> bool:
    """Return whether a trial is to be pruned: it is no better than a limit halfway."""
    return step == NUM_STEPS // 2 and loss > limit


def with_optuna(num_ranks: int, num_trials: int) -> float:
    """Run trials one after another, each on processes of this machine; return the best rate."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": [1e-4, 1e-2, 1e-1]}))

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        try:
            return float(unidist.run(train, (rate, functools.partial(stop_if_bad, limit=1.0)), num_proc=num_ranks)[0])
        except unidist.errors.RemoteError as exc:
            if isinstance(exc.__cause__, Pruned):
                raise optuna.TrialPruned(str(exc.__cause__)) from exc
            raise

    study.optimize(objective, n_trials=num_trials)
    for trial in study.trials:
        print(f"rate {trial.params['rate']:g}: {trial.state.name.lower()}, loss {trial.value}")
    return float(study.best_params["rate"])


def with_tune(num_ranks: int) -> float:
    """Run trials of Ray Tune, each with ranks of its own on Ray's cluster; return the best rate."""
    import ray
    from ray import tune

    from unidist.ray import RayExecutor

    def trainable(config: dict[str, float]) -> None:
        with RayExecutor(num_workers=num_ranks) as executor:
            executor.start()
            tune.report({"loss": executor.run(train, [config["rate"]])[0]})

    ray.init("local", num_cpus=num_ranks + 1, include_dashboard=False, object_store_memory=80 << 20)
    bundles = [{"CPU": 1}] * (num_ranks + 1)
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(trainable, tune.PlacementGroupFactory(bundles)),
            param_space={"rate": tune.grid_search([1e-4, 1e-1])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=str(Path(folder).resolve()), verbose=0),
        ).fit()
        best = results.get_best_result().config["rate"]
    ray.shutdown()
    return float(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="trials of Ray Tune")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--num-trials", type=int, default=3)
    args = parser.parse_args()
    best = with_tune(args.num_ranks) if args.tune else with_optuna(args.num_ranks, args.num_trials)
    print(f"best rate: {best:g}")


if __name__ == "__main__":
    main()

"""APPFL's aggregators, handed what hpcfl's clients sent: ``python -m judges.outside.appfl FOLDER [FILE]``.

Its clients send models w_i or, with ``gradient_based``, −Δ_i. Where it takes a model's change against the newest state
w instead of that which the client began with, it is handed w + Δ_i; where it divides by N, and the paper does not, N α.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from appfl.algorithm import aggregator as appfl
from omegaconf import OmegaConf

from judges.outside.read import Arrays, Row, Run, Visit, judge, read, stepped

N = 6


def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in arrays.items()}


def aggregator(kind: Any, run: Run, **configs: Any) -> Any:
    """Return one whose model is the one that the run begins with."""
    layers = dict.fromkeys(name.partition(".")[0] for name in run.states[0])
    shapes = {layer: run.states[0][f"{layer}.weight"].shape for layer in layers}
    model = torch.nn.ModuleDict({layer: torch.nn.Linear(*shape[::-1]) for layer, shape in shapes.items()}).double()
    model.load_state_dict(tensors(run.states[0]))
    return kind(model, OmegaConf.create(configs))


def shared(state: dict[str, torch.Tensor]) -> Arrays:
    return {name: value.numpy().copy() for name, value in state.items()}


def rounds(kind: Any, run: Run, **configs: Any) -> Iterator[Arrays]:
    """Steps with the models of all who were invited."""
    made = aggregator(kind, run, **configs)
    for step in run.steps:
        for visit in step:
            made.set_client_sample_size(visit.client, int(visit.weight))
        yield shared(made.aggregate({visit.client: tensors(run.model(visit)) for visit in step}))


def sent(made: Any, run: Run, visit: Visit, how: str) -> dict[str, torch.Tensor]:
    """Return what a client gives: its model, or −Δ, or the ``newest`` state with Δ put onto it."""
    if how == "models":
        return tensors(run.model(visit))
    delta, newest = tensors(visit.change), made.get_parameters()
    return {name: value + delta[name] if how == "newest" else -delta[name] for name, value in newest.items()}


def one_by_one(kind: Any, run: Run, how: str, **configs: Any) -> Iterator[Arrays]:
    """Steps of an aggregator that is handed one visit at a time and measures staleness itself."""
    made, waiting = aggregator(kind, run, gradient_based=how == "changes", **configs), run.visits
    for step in run.steps:
        for visit in step:
            for each in {one.client: one for one in reversed(waiting)}.values():  # the next visit of each client
                if each.version == made.global_step:
                    made.get_parameters(client_id=each.client)
            after, waiting = made.aggregate(visit.client, sent(made, run, visit, how)), waiting[1:]
        yield shared(after)


def groups(kind: Any, run: Run, how: str, **configs: Any) -> Iterator[Arrays]:
    """Steps of visits that its scheduler brings together and tells the staleness of; who comes twice has two names."""
    made = aggregator(kind, run, gradient_based=how == "changes", **configs)
    for step in run.steps:
        for number, visit in enumerate(step):
            made.set_client_sample_size(number, int(visit.weight))
        models = {number: sent(made, run, visit, how) for number, visit in enumerate(step)}
        staleness = {number: visit.staleness for number, visit in enumerate(step)}
        if kind is appfl.FedQueueAggregator:
            yield shared(made.aggregate(models, staleness, dict.fromkeys(models, 1)))
        elif len(step) == 1:
            yield shared(made.aggregate(0, models[0], staleness=staleness[0]))
        else:
            yield shared(made.aggregate(local_models=models, staleness=staleness))


def rows(folder: Path) -> Iterator[Row]:
    runs = {path.stem: read(path) for path in folder.glob("fed*.npz")}

    def row(what: str, name: str, kind: Any, steps: Any, *how: str, bare: Any = None, **configs: Any) -> Row:
        def compared(*how: str, **more: Any) -> Row:
            return stepped(what, f"appfl.{kind.__name__}", steps(kind, runs[name], *how, **configs | more), runs[name])

        return compared(*how) | ({} if bare is None else {"as_it_is": compared(bare[0], **bare[1])["worst"]})

    def law(name: str) -> dict[str, Any]:
        said = runs[name].settings["staleness"]
        return {"num_clients": N, "staleness_fn": said["weight"], "staleness_fn_kwargs": said | {"beta": said["a"]}}

    sizes = {"client_weights_mode": "sample_size"}
    yield row("FedAvg, by samples", "fedavg", appfl.FedAvgAggregator, rounds, **sizes)
    yield row("FedAvg, uniform", "fedavg-uniform", appfl.FedAvgAggregator, rounds)
    for name in ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"):
        server = runs[name.lower()].settings["server"]
        betas = {f"server_momentum_param_{place}": beta for place, beta in enumerate(server["betas"], 1)}
        own = betas | {"server_learning_rate": server["lr"], "server_adapt_param": server.get("tau")}
        yield row(name, name.lower(), getattr(appfl, f"{name}Aggregator"), rounds, **own, **sizes)
    alpha, own = runs["fedasync"].settings["algorithm"]["alpha"], ("fedasync", appfl.FedAsyncAggregator, one_by_one)
    yield row("FedAsync", *own, "models", bare=("models", {"alpha": alpha}), alpha=N * alpha, **law("fedasync"))
    size, own = runs["fedbuff"].settings["participation"]["buffer"], ("fedbuff", appfl.FedBuffAggregator, one_by_one)
    said, bare = law("fedbuff") | {"K": size, "alpha": N / size}, {"alpha": 1.0}
    yield row("FedBuff, of models", *own, "newest", bare=("models", bare), **said)
    yield row("FedBuff, of changes", *own, "changes", bare=("changes", bare), **said)
    for what, kind in (("FedCompass", appfl.FedCompassAggregator), ("FedQueue", appfl.FedQueueAggregator)):
        name, alpha = what.lower(), runs[what.lower()].settings.get("server", {}).get("lr")  # FedQueue has none
        yield row(f"{what}, of models", name, kind, groups, "newest", bare=("models", {}), alpha=alpha, **law(name))
        yield row(f"{what}, of changes", name, kind, groups, "changes", alpha=alpha, **law(name))


if __name__ == "__main__":
    gc.freeze()  # its aggregators call for a collection in each step
    judge(["appfl", "torch"], rows)

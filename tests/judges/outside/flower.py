"""Flower's strategies, handed the models of hpcfl's clients: ``python -m judges.outside.flower FOLDER [FILE]``.

Its v begins with 0, where the paper has τ² at least: it is given τ². Its FedAdam multiplies η by
√(1 − β₂^(t+1)) / (1 − β₁^(t+1)) in round t = 1, 2, …, where the paper has nothing: it is given an η divided by that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from judges.outside.read import Arrays, Row, Run, judge, read, stepped


class Nodes:
    """The part of Flower's grid that a strategy asks: which nodes there are."""

    def __init__(self, clients: list[int]) -> None:
        self.clients = clients

    def get_node_ids(self) -> list[int]:
        return self.clients


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def rounds(strategy: Any, run: Run, bare: bool = False) -> Iterator[Arrays]:
    """Steps of a strategy that is given what the paper has, or is left as it is."""
    shared, adaptive = record(run.states[0]), hasattr(strategy, "tau") and not bare
    eta = strategy.eta if adaptive else None
    if adaptive:
        strategy.v_t = {name: np.full_like(value, strategy.tau**2) for name, value in run.states[0].items()}
    for t, step in enumerate(run.steps, 1):
        if adaptive and isinstance(strategy, flower.FedAdam):
            strategy.eta = eta / (sqrt(1 - strategy.beta_2 ** (t + 1)) / (1 - strategy.beta_1 ** (t + 1)))
        visits = {visit.client + 1: visit for visit in step}  # 0 is no node
        replies = []
        for asked in strategy.configure_train(t, shared, ConfigRecord(), Nodes(list(visits))):
            visit = visits[asked.metadata.dst_node_id]
            counted = MetricRecord({"num-examples": int(visit.weight)})
            replies.append(
                Message(RecordDict({"arrays": record(run.model(visit)), "metrics": counted}), reply_to=asked)
            )
        shared, _ = strategy.aggregate_train(t, replies)
        yield {name: shared[name].numpy() for name in run.states[0]}


def rows(folder: Path) -> Iterator[Row]:
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for name in ("FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"):
        run, keys = read(folder / f"{name.lower()}.npz"), {}
        server = run.settings.get("server", {})
        if name == "FedAvgM":
            keys = {"server_learning_rate": server["lr"], "server_momentum": server["betas"][0]}
        elif server:
            keys = {"eta": server["lr"], "tau": server["tau"]}
            keys |= {f"beta_{place}": beta for place, beta in enumerate(server["betas"], 1) if beta}  # Adagrad's is 0

        what, kind = f"{name}, by samples" if name == "FedAvg" else name, getattr(flower, name)
        row = stepped(what, f"flwr.{name}", rounds(kind(**keys), run), run)
        if "tau" in keys:
            row["as_it_is"] = stepped(what, "", rounds(kind(**keys), run, bare=True), run)["worst"]
        yield row


if __name__ == "__main__":
    judge(["flwr", "numpy"], rows)

"""SCAFFOLD: control variates keep clients from drifting to optima of their own (Karimireddy et al., ICML 2020).

Local steps are ``y ← y − η (g_i(y) − c_i + c)``; then, by the paper's option II, ``c_i⁺ = c_i − c + (w − y)/(τ_i η)``,
the mean of a visit's gradients. The server takes ``w ← w + mean_S Δ_i`` and ``c ← c + 1/N Σ_S (c_i⁺ − c_i)``, N being
all clients. All begin with 0 and a client keeps c_i⁺ only if its visit counted: c is the mean of all c_i, and
`[weighting]` corrects the change of w alone. The paper's η_g is ``server.lr`` with ``server.optimizer = "momentum"``
and ``server.betas = [0]``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from hpcfl.algorithms.base import Block, By, Client, Layout, Participation, State, Sums, Task, Visits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.local_sgd import check_plain
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning.optim import Shifted, Weighed, factors, zeros
from hpcfl.sums.message import moved

CONTROL, RISE = "control.", "rise."  # c at the server and c_i at clients; what a client tells of c_i⁺ − c_i


class Scaffold(FedAvg):
    """FedAvg of local steps by gradients that are corrected for how much a client's differ from all clients'."""

    name: Literal["scaffold"] = "scaffold"  # type: ignore[assignment]
    keeps_sent: ClassVar[bool] = True
    means_alone: ClassVar[bool] = False
    needs_members: ClassVar[str] = "c is the mean over all"
    weights: Literal["samples", "uniform"] = "uniform"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        check_plain(self, "optimizer", "momentum", "persist_optimizer", "weight_decay")

    def init_server(self, task: Task) -> State:
        model = super().init_server(task)
        return model | {CONTROL + name: value for name, value in zeros(model).items()}

    def init_client(self, task: Task, client: int) -> State:
        return {CONTROL + name: value for name, value in zeros(task.initial()).items()}

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return tuple((*names, *(RISE + name for name in names)) for names in super().layers(task))

    def mean_weights(self) -> By:
        return self.weights

    def summed(self, task: Task) -> set[str]:
        return {RISE + name for name in task.initial()}

    def layout(self, task: Task) -> Layout:
        like = {name: Block(tuple(value.shape), value.dtype) for name, value in task.initial().items()}
        groups = [{name: like[name.removeprefix(RISE)] for name in names} for names in self.layers(task)]
        return ({"loss": Block((), task.dtype)}, *reversed(groups))

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        shift = {name: shared[CONTROL + name] - memory[CONTROL + name] for name in params}
        optimiser = Shifted(self.learning_rate(visits.round), shift=shift)
        return optimiser.train(task, params, self.local_steps(task, visits))

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        after, one = dict(personal), visits.ones(len(visits.clients))
        for message in super().client(task, shared, personal, visits):
            way = torch.from_numpy(self.taken(visits)).double() * self.learning_rate(visits.round)
            rises, training = dict[str, tuple[Tensor, Tensor]](), visits.training
            for name, (change, _) in ((name, sent) for name, sent in message.items() if name != "loss"):
                if isinstance(training, Weighed):  # its steps have not moved it by so much
                    change = change - training.extra[name]
                control = CONTROL + name
                rise = -change / factors(way, change) - shared[control]
                rises[RISE + name], after[control] = (rise, one), personal[control] + rise
            yield {**message, **rises}
        return after

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        after, clients = super().server(task, shared, sums), task.federation.clients
        for name in task.initial():
            after[CONTROL + name] = moved(shared[CONTROL + name], sums.over(RISE + name, clients))
        return after

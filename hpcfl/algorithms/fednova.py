"""FedNova: unequal numbers of local steps lead nobody astray (Wang et al., NeurIPS 2020).

``w ← w + τ_eff Σ p_i Δ_i/‖a_i‖₁``, ``τ_eff = Σ p_i ‖a_i‖₁``, p_i over those who counted, where the τ_i steps of a visit
lead to ``Δ_i = −η Σ_k a_ik g_ik``. Of plain steps ‖a‖₁ is τ; with heavy-ball momentum ρ it is
``[τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ)``; with a proximal term, α = ημ, ``(1 − (1 − α)^τ)/α``, then τ_eff = Σ p_i τ_i, as
in the authors' code. Their momentum at the server is ``server.optimizer = "momentum"``. It is exact as η → 0 only.

With `[weighting]` τ_eff is that of whole visits of all those over whom its means are: with the steps that were taken
it would be a product of two random sums.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Block, By, Client, Ints, Layout, Participation, State, Sums, Task, Visits
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.algorithms.local_sgd import check_plain
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning.optim import Weighed, factors
from hpcfl.sums.message import CorrectedSums, moved


class FedNova(FedProx):
    """Averages what a step moves each client's model by, and takes as many of such steps as clients do on average."""

    means_alone: ClassVar[bool] = False
    counts_steps: ClassVar[bool] = True
    name: Literal["fednova"] = "fednova"  # type: ignore[assignment]
    mu: float = Field(0.0, ge=0)
    """Strength μ of a proximal term; 0: none."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        check_plain(self, "optimizer", "persist_optimizer", *(["momentum"] if self.mu else []))
        if self.mu * self.lr >= 1:
            raise refusal("algorithm.mu", f"less than 1/algorithm.lr = {1 / self.lr:g}", self.mu, 0.5 / self.lr)

    def mean_weights(self) -> By:
        return self.weights

    def layout(self, task: Task) -> Layout:
        first, *layers = super().layout(task)
        return ({**first, "steps": Block((), task.dtype)}, *layers)

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        whole = isinstance(visits.training, Weighed)  # what is sent then stands for the whole visit
        for message in super().client(task, shared, personal, visits):
            if "loss" in message:  # which comes first: only now it is known what steps were taken
                steps = self._planned(visits.samples) if whole else torch.from_numpy(self.taken(visits)).double()
                norm = self._norm(steps, self.learning_rate(visits.round))
                loss, weight = message["loss"]
                yield {**message, "steps": (factors(steps if self.mu else norm, loss), weight)}
            else:
                yield {name: (value.div_(factors(norm, value)), weight) for name, (value, weight) in message.items()}
        return personal

    def _norm(self, taken: Tensor, rate: float) -> Tensor:
        """Return ‖a‖₁ of so many steps."""
        if rho := self.momentum:
            return (taken - rho * (1 - rho**taken) / (1 - rho)) / (1 - rho)
        return (1 - (1 - rate * self.mu) ** taken) / (rate * self.mu) if self.mu else taken

    def _planned(self, samples: Ints) -> Tensor:
        """Return the steps of whole visits of clients with so many samples, float64 [n]."""
        return torch.tensor([self.visit_steps(int(each))[0] for each in samples], dtype=torch.float64)

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        if isinstance(sums, CorrectedSums):
            samples = task.federation.train_sizes[sums.clients]
            planned, share = self._planned(samples), torch.from_numpy(samples / samples.sum())
            counts = planned if self.mu else self._norm(planned, self.lr)
            steps = (counts * share).sum() if self.weights == "samples" else counts.mean()
        else:
            steps = sums.mean("steps")  # on the device, which nobody waits for
        return {name: moved(value, sums.mean(name).mul_(steps)) for name, value in shared.items()}

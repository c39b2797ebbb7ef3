"""HF-MAML, the Hessian-free form of personalised FedAvg (Fallah, Mokhtari & Ozdaglar, NeurIPS 2020).

A local step on three batches: ``g₁ = ∇f(w; 1)``, ``w' = w − α g₁``, ``g₂ = ∇f(w'; 2)``,
``w ← w − β (g₂ − α H₃ g₂)``, H₃ being the Hessian at w on batch 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import State, Task, Visits
from hpcfl.algorithms.local_sgd import LocalTraining, last
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning import derivatives


class HfMaml(LocalTraining):
    """Personalised FedAvg: a model that is good after one gradient step on a client's own data; `lr` is β."""

    name: Literal["hf_maml"] = "hf_maml"
    inner_lr: float = Field(0.01, ge=0)
    """Step size α of the adaptation."""
    steps: int = Field(1, ge=1)
    """Local steps per visit."""
    hessian: Literal["exact", "difference"] = "exact"
    """``H₃ g₂`` by double backpropagation, or as ``(∇f(w + δ g₂) − ∇f(w − δ g₂)) / 2δ``."""
    delta: float = Field(1e-3, gt=0)
    """δ of ``difference``."""
    evaluation: Literal["adapted", "shared", "fine-tune"] = "adapted"
    """What a client is tested with: the model after one step of size α on all its training data, before it, or after
    `tune_epochs` of the last `tune_layers` layers (step size β by default)."""
    tune_layers: int = Field(1, ge=1)
    """Layers that learn in `tune_epochs`: the last so many."""

    def tuned_layers(self, layers: int) -> range:
        return last("tune_layers", self.tune_layers, layers)

    def visit_steps(self, samples: int) -> tuple[int, int]:
        return self.steps, 1

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        first, others = visits, replace(visits, more=None)  # a step is asked for once
        threes = [
            task.batches(each, self.batch, steps=self.steps, phase=phase)
            for phase, each in enumerate((first, others, others))
        ]
        losses = []
        for one, two, three in zip(*threes):
            slope, loss = task.gradients(params, one)
            losses.append(loss)
            along, _ = task.gradients(_moved(params, slope, -self.inner_lr), two)
            if self.hessian == "exact":
                bent = derivatives.hessian_vector_product(task, params, three, along)
            else:
                ahead, _ = task.gradients(_moved(params, along, self.delta), three)
                behind, _ = task.gradients(_moved(params, along, -self.delta), three)
                bent = {name: (ahead[name] - behind[name]) / (2 * self.delta) for name in params}
            for name, value in params.items():
                value.add_(along[name] - self.inner_lr * bent[name], alpha=-self.lr)
        return torch.stack(losses).mean(0)

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        if self.evaluation != "adapted":
            return super().model(task, shared, personal, visits)
        params = task.replicate(shared, visits)
        gradients, _ = task.gradients(params, next(task.batches(visits, 0, steps=1)))
        return _moved(params, gradients, -self.inner_lr)


def _moved(params: State, along: State, size: float) -> State:
    return {name: value + size * along[name] for name, value in params.items()}

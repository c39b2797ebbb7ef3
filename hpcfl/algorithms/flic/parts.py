"""Which tensors of a model are the embedding φ, the shared part α and the personal part β (FLIC, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcfl.base.types import State
from hpcfl.learning.task import Task
from hpcfl.models.latent import EMBED

Inside = Literal["fedrep", "fedavg-ft", "l2gd"]
OWN = "own."
"""What begins the names of personal copies of shared tensors (L2GD)."""


@dataclass(frozen=True)
class Parts:
    """The names of a model's tensors by whose they are.

    Attributes
    ----------
    embedding : tuple of str
        φ_i, personal.
    shared : tuple of str
        α.
    personal : tuple of str
        β_i.
    first : int
        Number of the first stage that sees the latent space.
    mix : float, optional
        ω of ``θ_i = ω α + (1 − ω) β_i`` where α and β_i are the same layers.
    """

    embedding: tuple[str, ...]
    shared: tuple[str, ...]
    personal: tuple[str, ...]
    first: int
    mix: float | None = None

    @classmethod
    def of(cls, task: Task, inside: Inside, mix: float) -> Parts:
        """Return the parts of the task's model: above the embedding as the method `inside` has it."""
        stages = [layer for layer in task.layers if layer.name.startswith(EMBED)]
        embedding = tuple(name for layer in stages for name in layer.tensors)
        *hidden, head = [tuple(layer.tensors) for layer in task.layers[len(stages) :]]
        below = tuple(name for names in hidden for name in names)
        if inside == "fedrep":
            return cls(embedding, below, head, len(stages))
        if inside == "fedavg-ft":
            return cls(embedding, below + head, (), len(stages))
        own = tuple(OWN + name for name in below + head)
        return cls(embedding, below + head, own, len(stages), mix)

    def predicting(self, params: State) -> State:
        """Return the parameters with those in place that the model predicts with."""
        if self.mix is None:
            return params
        mixed = {name: self.mix * params[name] + (1 - self.mix) * params[OWN + name] for name in self.shared}
        return params | mixed

    def entered(self, initial: State) -> State:
        """Return a client's φ and β as they begin, from the initial values of its model."""
        return {name: initial[name.removeprefix(OWN)].clone() for name in (*self.embedding, *self.personal)}

"""A generalised linear model: the strongly convex and smooth objective on which theory is stated, and rougher ones."""

from __future__ import annotations

from math import prod
from typing import Literal

from pydantic import Field

from hpcfl.base.errors import UsageError, check_within
from hpcfl.base.lazy import torch
from hpcfl.models import Model
from hpcfl.models.modules import custom


class Glm(Model):
    """A generalised linear model of few parameters: ``z = W x + b`` in one layer ``linear`` or in several, and a link.

    All parameters begin at zero: theory may start anywhere, and zero is where logistic and ridge regression by custom
    start. It treats all classes alike, so nothing has to be broken as between hidden units.
    """

    name: Literal["glm"] = "glm"
    link: Literal["logistic", "softmax", "tanh", "rough", "identity"] = "logistic"
    """What outputs are made of z. ``logistic``: two classes, logits (0, z). ``softmax``: a z for each class. ``tanh``:
    a target, tanh(z). ``rough``: a target, as smooth a function of z as `smoothness` says. ``identity``: a target, z:
    ridge regression. Objectives are convex but for ``tanh`` and ``rough``."""
    layers: int = Field(1, ge=1)
    """Number of layers, at most that of features: z is a sum of so many linear terms, each of features of its own, in
    their order. In a round of SALF the last features' layer is ready first."""
    bias: bool = True
    """z has a constant term."""
    ridge: float = Field(0.0, ge=0)
    """μ of the penalty μ/2·‖θ‖² on all parameters, biases included, a part of the objective."""
    smoothness: float = Field(1.0, gt=0)
    """η (rough): the gradient's Hölder order as a function of features; up to 1 it is no Lipschitz function of the
    parameters either."""
    roughness: float = Field(0.5, ge=0, lt=1)
    """Share of the slope of the rough link that its waves may add or take away (rough); below 1 it is monotone."""

    @property
    def penalty(self) -> float:
        return self.ridge

    @property
    def curvature(self) -> tuple[float, float] | None:
        """Bounds of the second derivatives of a sample's loss by z, in any direction; None where it is not convex."""
        return {"logistic": (0.0, 0.25), "softmax": (0.0, 0.5), "identity": (2.0, 2.0)}.get(self.link)

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        check_within("model.layers", self.layers, 1, prod(shape), " for these features")
        suited = {1: ("tanh", "rough", "identity"), 2: ("logistic", "softmax")}.get(classes, ("softmax",))
        if self.link not in suited:
            held = "targets" if classes == 1 else f"{classes} classes"
            expected = "' or '".join(suited)
            where = f"model.link = '{self.link}' does not suit labels that are {held}"
            raise UsageError(f"{where}: expected '{expected}'; did you mean '{suited[0]}'?")

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        outputs = classes if self.link == "softmax" else 1
        rough = [torch.nn.Tanh(), custom.Rough(self.smoothness, self.roughness)]
        links: dict[str, list[torch.nn.Module]] = {"logistic": [custom.TwoLogits()], "tanh": rough[:1], "rough": rough}
        link = links.get(self.link, [])
        if self.layers > 1:  # of nearly as many features each, as `numpy.array_split` makes them; the last has the bias
            least, more = divmod(prod(shape), self.layers)
            sizes = [least + (i < more) for i in range(self.layers)]
            terms = [custom.Addend(size, outputs, self.bias and i == self.layers - 1) for i, size in enumerate(sizes)]
            parts: list[list[torch.nn.Module]] = [[term] for term in terms]
            parts[0][:0] = [torch.nn.Flatten(), torch.nn.ConstantPad1d((0, outputs), 0.0)]
            parts[-1] += link
            return [(f"term{i}", torch.nn.Sequential(*part)) for i, part in enumerate(parts, start=1)]
        linear = torch.nn.Linear(prod(shape), outputs, bias=self.bias)
        for tensor in linear.parameters():
            torch.nn.init.zeros_(tensor)
        return [("linear", torch.nn.Sequential(torch.nn.Flatten(), linear, *link))]

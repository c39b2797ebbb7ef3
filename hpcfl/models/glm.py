"""A generalised linear model: the strongly convex and smooth objective on which theory is stated, and rougher ones."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.models import Model

if TYPE_CHECKING:
    from torch import nn


class Glm(Model):
    """A generalised linear model of few parameters: one layer ``linear``, ``z = W x + b``, and a link.

    All parameters begin at zero: theory may start anywhere, and zero is where logistic and ridge regression by custom
    start. It treats all classes alike, so nothing has to be broken as between hidden units.
    """

    name: Literal["glm"] = "glm"
    link: Literal["logistic", "softmax", "tanh", "rough"] = "logistic"
    """What outputs are made of z. ``logistic``: two classes by one z, logits (0, z). ``softmax``: a z for each class.
    ``tanh``: a target, tanh(z). ``rough``: a target, as smooth a function of z as `smoothness` says
    (`hpcfl.models.modules.custom.Rough`). Objectives of the first two are convex.
    """
    bias: bool = True
    """z has a constant term."""
    ridge: float = Field(0.0, ge=0)
    """μ of the penalty μ/2·‖θ‖² on all parameters, biases included, which belongs to the objective."""
    smoothness: float = Field(1.0, gt=0)
    """η (rough): the gradient's Hölder order as a function of a sample's features. At most 1, it is no Lipschitz
    function of the parameters either.
    """
    roughness: float = Field(0.5, ge=0, lt=1)
    """Share of the slope of the rough link that its waves may take away or add (rough); below 1 it is monotone."""

    @property
    def penalty(self) -> float:
        return self.ridge

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        suited = ("tanh", "rough") if classes == 1 else ("logistic", "softmax") if classes == 2 else ("softmax",)
        if self.link not in suited:
            held = "targets" if classes == 1 else f"{classes} classes"
            expected = "' or '".join(suited)
            raise UsageError(
                f"model.link = '{self.link}' does not suit labels that are {held}: expected '{expected}'; "
                f"did you mean '{suited[0]}'?"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        from torch import nn

        from hpcfl.models.modules import custom

        linear = nn.Linear(prod(shape), classes if self.link == "softmax" else 1, bias=self.bias)
        for tensor in linear.parameters():
            nn.init.zeros_(tensor)
        modules: list[nn.Module] = [nn.Flatten(), linear]
        if self.link == "logistic":
            modules.append(custom.TwoLogits())
        elif self.link != "softmax":
            modules.append(nn.Tanh())
        if self.link == "rough":
            modules.append(custom.Rough(self.smoothness, self.roughness))
        return [("linear", nn.Sequential(*modules))]

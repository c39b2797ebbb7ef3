"""The minimum of the objective over all training samples: what the gap of a method is measured from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from hpcfl.algorithms.fedlrgd.low_rank import flat, shaped
from hpcfl.base.errors import RunError, UsageError
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, State
from hpcfl.config import Config
from hpcfl.learning.task import Task

MOST = 2000  # parameters: Newton's steps factor a matrix of so many rows and columns
EXACT, ENOUGH = 1e-12, 1e-9  # the gradient's norm that is sought, and that will do where rounding allows of no smaller
ROUGHLY = 1e-6  # the gradient's largest entry at which Newton's steps take over
NEWTON = 100  # most steps of Newton's
HALVINGS = 30  # of a step that does not help
FLAT = 1e-13  # curvature, as a part of the largest, below which the objective counts as constant in a direction
SADDLE = 1e-6  # least curvature, as a part of the largest, that makes a saddle where it is negative
NEAR = 1e-3  # step that is left at a minimum, relative to the parameters: where there is none it is about 1


@dataclass(frozen=True)
class Optimum:
    """Where F is least: F*, θ* (float64, ``{name: […]}``), the norm of ∇F there, and n of clients and server."""

    value: float
    parameters: State
    gradient: float
    samples: int

    def facts(self) -> dict[str, float | int]:
        """Value, norm of the gradient, number of samples n and number of parameters p."""
        size = sum(value.numel() for value in self.parameters.values())
        return {"value": self.value, "gradient": self.gradient, "n": self.samples, "p": size}


def optimum(task: Task, starts: int = 4, clients: Sequence[int] | None = None) -> Optimum:
    """Find the minimum of ``F(θ) = 1/n Σ f(x; θ) + μ/2·‖θ‖²`` over the training samples of `clients` and server.

    In float64 whatever the task's precision: L-BFGS from each start (the task's initial values, and keyed standard
    normals), then Newton's steps from the best of what they find, until the gradient's norm is at most 1e-12 or
    rounding allows of no smaller one (at most 1e-9). Where F is convex (links logistic and softmax) that is the global
    minimum; else it is the best local one that was found.

    Raises
    ------
    UsageError
        If clients have features of different shapes, or the model has too many parameters.
    RunError
        If there is no minimum to be found, as without a penalty on separable data.
    """
    objective = PooledObjective(task, clients)
    first = objective.flat(task.initial())
    others = [keyed(task.seed, "optimum", client=i).standard_normal(len(first)) for i in range(1, starts)]
    ends = [objective.descended(start) for start in (first, *others)]
    theta = objective.polished(min(ends, key=objective.value))
    parameters = shaped(torch.from_numpy(theta), objective.like)
    return Optimum(objective.value(theta), parameters, objective.norm(theta), len(objective.y))


def of(config: Config, data_dir: Path | None) -> Optimum:
    """Find the minimum of a config's objective."""
    config.check(data_dir)
    federation = config.federation(data_dir)
    members = config.rules.taking_part(config.clients).tolist()
    return optimum(Task(config.model, federation, config.seed, precision="double"), clients=members)


class PooledObjective:
    """F of parameters as one vector ``[p]``; called with a tensor, it is differentiable as often as wanted.

    Of the samples of some `clients` (None: all), and of the server's where it is asked for.
    """

    def __init__(self, task: Task, clients: Sequence[int] | None = None, server: bool = True) -> None:
        if task.parameter_count > MOST:
            got = task.parameter_count
            raise UsageError(f"model: expected at most {MOST} parameters for a minimum to be found, got {got}")
        self.task, self.like = task, task.initial()
        federation = task.federation
        if len(set(federation.shapes)) > 1:
            raise UsageError("data: clients have features of different shapes: expected one model for all of them")
        held = [federation.client(i) for i in (range(federation.clients) if clients is None else clients)]
        pairs = [(each.train_features, each.train_labels) for each in held]
        if server and (own := federation.server_train()):
            pairs.append(own)
        x, y = (torch.from_numpy(np.concatenate(each)) for each in zip(*pairs))
        self.x, self.y = (part.double() if part.is_floating_point() else part for part in (x, y))

    def flat(self, parameters: State) -> Floats:
        vector: Floats = flat({name: parameters[name] for name in self.like}).double().cpu().numpy()
        return vector

    def __call__(self, theta: Tensor) -> Tensor:
        outputs = self.task.forward(shaped(theta.unsqueeze(0), self.like), self.x.unsqueeze(0))
        return self.task.loss.each(outputs, self.y.unsqueeze(0)).mean() + self.task.penalty / 2 * theta.square().sum()

    def value(self, theta: Floats) -> float:
        return float(self(torch.from_numpy(theta)))

    def gradient(self, theta: Floats) -> Floats:
        return self._slopes(theta)[1].detach().numpy()

    def _slopes(self, theta: Floats, again: bool = False) -> tuple[Tensor, Tensor]:
        """θ and ∇F, to be differentiated `again`. Not by torch.func.grad, which loads torch's compiler."""
        at = torch.tensor(theta, requires_grad=True)
        (slopes,) = torch.autograd.grad(self(at), at, create_graph=again)
        return at, slopes

    def norm(self, theta: Floats) -> float:
        """‖∇F‖."""
        return float(np.linalg.norm(self.gradient(theta)))

    def hessian(self, theta: Floats) -> Floats:
        """∇²F ``[p, p]``."""
        at, slopes = self._slopes(theta, again=True)
        rows = [torch.autograd.grad(slope, at, retain_graph=True)[0] for slope in slopes]
        matrix: Floats = torch.stack(rows).numpy()
        return (matrix + matrix.T) / 2

    def descended(self, theta: Floats) -> Floats:
        """Where L-BFGS comes to from a start."""
        from scipy.optimize import minimize  # here: a check of the config only looks whether there is an optimum

        options = {"gtol": ROUGHLY, "ftol": 0.0, "maxiter": 10_000, "maxfun": 20_000, "maxcor": 30}
        end: Floats = minimize(self.value, theta, jac=self.gradient, method="L-BFGS-B", options=options).x
        return end

    def polished(self, theta: Floats) -> Floats:
        """Where Newton's steps come to; RunError where that is no minimum."""
        for _ in range(NEWTON):
            if not EXACT < self.norm(theta) < inf:
                break
            step, _ = self._newton(theta)
            better = (theta - step / 2**k for k in range(HALVINGS))
            ahead = next((point for point in better if self.norm(point) < self.norm(theta)), None)
            if ahead is None:
                break
            theta = ahead
        norm = self.norm(theta)  # no minimum: a slope that is left, a saddle, or a descent that goes on for ever
        slope = f"the gradient's norm is {norm:.3g}"
        if not norm <= ENOUGH:
            hint = "with model.link = 'rough' it needs model.smoothness above 1"
            raise RunError(f"no minimum found: {slope}, expected at most {ENOUGH:g}; {hint}")
        step, least = self._newton(theta)
        if least < -SADDLE:
            raise RunError("no minimum found: the steps end at a saddle; expected a larger penalty (model.ridge)")
        length = float(np.linalg.norm(step))
        if length > NEAR * (1 + float(np.linalg.norm(theta))):
            far = f"but the next step would still be of length {length:.3g}, as on separable data without a penalty"
            raise RunError(f"there is no minimum: {slope}, {far}; did you mean model.ridge = 1e-6?")
        return theta

    def _newton(self, theta: Floats) -> tuple[Floats, float]:
        """Newton's step, along directions that are not flat, and the least curvature as a part of the largest."""
        curvatures, axes = np.linalg.eigh(self.hessian(theta))
        steep = np.abs(curvatures) > FLAT * np.abs(curvatures).max()
        axes, slopes = axes[:, steep], self.gradient(theta)
        step: Floats = axes @ ((axes.T @ slopes) / curvatures[steep])
        return step, float(curvatures.min() / np.abs(curvatures).max())

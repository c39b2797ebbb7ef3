"""FedLRGD: federated low-rank gradient descent (Jadbabaie, Makur & Shah, Algorithm 1).

The server draws r parameter vectors ϑ_k; each client sends the sums of its samples' gradients there, once; the server
solves for weights under which the gradients of r samples of its own add up to those of all samples at every ϑ_k, and so
nearly everywhere if the loss is smooth in the data; then it descends alone, and nobody is invited any more.

The paper lets each client solve (eq. 35), for which the server sends p inverses; since weights are linear in the sums,
solving once at the server is the same algorithm without them (`solve_at`). Samples that the server holds beyond r
count like a client's.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Client, Extras, Header, Model, Participation, ServerState, Task, Visits
from hpcfl.algorithms.fedlrgd.low_rank import COPIES, Bound, Surrogates, conditioning, flat, shaped, solved
from hpcfl.algorithms.fedlrgd.smoothness import check_still, check_unit_cube, kinks, server_samples
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import keyed
from hpcfl.base.types import State
from hpcfl.sums.message import Block, Layout, Sums

POINTS, INVERSE, SUMS = "points", "inverse", "sums"  # ϑ [r, p]; (G^(i))⁻ᵀ [p, r, r]; of a visit [r, p]
MEGABYTE = 2**20
WHO = "algorithm.name = 'fedlrgd'"


class FedLrgd(Algorithm):
    """Federated low-rank gradient descent: after one message of each client the server descends alone."""

    name: Literal["fedlrgd"] = "fedlrgd"
    rank: int = Field(8, ge=1)
    """Surrogate samples, which the server holds, and parameter vectors ϑ, r."""
    lr: float = Field(0.1, gt=0)
    """Step size of the server's descent, 1/L1 in the paper, L1 being the Lipschitz constant of the loss's gradient."""
    steps: int = Field(10, ge=1)
    """Steps of inexact gradient descent per round; the paper's S is this times the rounds without clients."""
    tolerance: float = Field(0.0, ge=0)
    """Descend no more once the norm of the inexact gradient is at most this."""
    growth: float = Field(100.0, gt=1)
    """Go back to where the norm was least, and stay there, once it has grown by this factor: descent on negative
    weights may diverge."""
    reach: float = Field(30.0, gt=0)
    """Go back so too once θ is farther from the initial parameters than this times ``scale·√p``."""
    scale: float = Field(1.0, ge=0)
    """Standard deviation of ϑ around the initial parameters: as far as the descent may lead."""
    penalty: Literal["reweighted", "exact"] = "reweighted"
    """The gradient of the model's penalty. ``reweighted``: it is re-weighted too (the paper). ``exact``: it is added as
    it is."""
    truncation: float = Field(1e-8, ge=0, lt=1)
    """Singular values of G^(i) of at most this times the largest, and what precision does not resolve, are left out."""
    damping: float = Field(0.0, ge=0)
    """Tikhonov regularisation of the solution, relative to the largest singular value; 0: none."""
    solve_at: Literal["server", "client"] = "server"
    """Who solves for the weights. ``server``: the server, once. ``client``: each client (the paper), to which a round
    before sends p inverses of r × r numbers."""
    pipelined: bool = False
    """Sums leave as r messages of p numbers, as printed, instead of one of r·p."""
    batch: int = Field(0, ge=0)
    """Samples of a client in one pass; 0: all of them. It changes memory and last bits."""
    memory: int = Field(1024, ge=1)
    """Megabytes that matrices G^(i), their factors and gradients may take at a time at the server; where several passes
    are needed, gradients are computed again."""
    theory: bool = False
    """Insist on the theory's assumptions: features in [0, 1]^d, a penalty, smooth layers, all clients in time."""
    metric_columns: ClassVar[dict[str, str]] = {
        "condition": "median condition number of G^(i) over the coordinates",
        "worst_condition": "largest condition number of G^(i), inf where one is singular",
        "truncated": "coordinates in which singular values were left out",
        "norm": "norm of the inexact gradient where it was last computed",
        "taken": "steps of inexact gradient descent since the start",
        "halted": "1 where the inexact gradient had grown too much, or led too far: the descent went back and ended",
    }

    def check(self, participation: Participation, known: bool = True) -> None:
        if participation.hold_out:
            what = "0: the weights of algorithm.name = 'fedlrgd' stand for the samples of all clients"
            raise refusal("participation.hold_out", what, participation.hold_out, 0)
        if self.theory and (participation.invite, participation.close) != ("all", "all"):
            what = "'all' and close = 'all' with algorithm.theory = true, which needs every client's sums"
            raise refusal("participation.invite", what, [participation.invite, participation.close])

    def check_model(self, model: Model, header: Header) -> None:
        if not model.chain:
            what = f"a chain of layers, since {WHO} needs the gradients of single samples"
            raise refusal("model.name", what, model.name, "algorithm.name = 'fedavg'")
        if header.server < self.rank:
            near = header.server or f"data.server = {self.rank} with data.deal = false, where the data have these keys"
            most = f"at most {header.server}, the training samples that the server holds"
            raise refusal("algorithm.rank", most, self.rank, near)
        if self.theory and model.penalty <= 0:
            what = "a model with a penalty above 0, for a strongly convex objective"
            raise refusal("algorithm.theory = true", what, model.penalty, "model.name = 'glm', model.ridge = 0.01")

    def _check_task(self, task: Task) -> None:
        """Refuse a loss that draws something, more than memory may hold, and what the theory does not cover."""
        check_still(task, WHO)
        p, bound = task.parameter_count, self.memory * MEGABYTE // 8
        client = self.solve_at == "client"
        fits = int((bound / p / 2) ** 0.5) if client else bound // p
        if self.rank > fits or bound < 2 * COPIES * p:
            what = "twice p r² numbers (inverses)" if client else "p r numbers (weights)"
            needed = max(p * self.rank * (2 * self.rank if client else 1), 2 * COPIES * p) * 8
            nearest = f"rank = {fits}" if bound >= 2 * COPIES * p and fits else f"memory = {-(-needed // MEGABYTE)}"
            room = f"room for {what} with p = {p} and algorithm.rank = {self.rank}, {needed / MEGABYTE:.3g} MB"
            raise refusal("algorithm.memory", room, self.memory, nearest)
        if self.theory:
            who = "algorithm.theory = true"
            if kinds := kinks(task):
                raise UsageError(f"{who} needs a loss that is smooth in the data, but there is {kinds[0]}")
            check_unit_cube(task, server_samples(task, WHO), who)

    def invites(self, round: int) -> bool:
        return round == (self.solve_at == "client")

    def clients_done(self, round: int) -> bool:
        return round > (self.solve_at == "client")

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        if not self.pipelined:
            return ((SUMS,),)
        return tuple((f"{SUMS}{k}",) for k in reversed(range(self.rank)))

    def layout(self, task: Task) -> Layout:
        self._check_task(task)
        p = task.parameter_count
        shape = (p,) if self.pipelined else (self.rank, p)
        groups = [{name: Block(shape, torch.float64) for name in names} for names in reversed(self.layers(task))]
        return ({"loss": Block((), torch.float64)}, *groups)

    def init_server(self, task: Task) -> State:
        theta, r = flat(task.initial()), self.rank
        drawn = keyed(task.seed, "points").standard_normal((r, len(theta)))
        points = theta + self.scale * on_device(torch.from_numpy(drawn).to(theta.dtype), theta.device)
        state = task.initial() | {POINTS: points}
        if self.solve_at == "client":
            state[INVERSE] = torch.zeros(len(theta), r, r, dtype=torch.float64, device=task.device)
        return state

    def init_extras(self, task: Task) -> Extras:
        theta = flat(task.initial())
        weights = torch.zeros(self.rank, len(theta), dtype=torch.float64, device=task.device)
        numbers = dict.fromkeys((*self.metric_columns, "heard"), 0.0)
        return {"weights": weights, "best": theta, "least": inf} | numbers

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        task, weight = self._reweighted(task), visits.weights("samples")
        held, gradients, losses = torch.from_numpy(visits.samples), list[Tensor](), list[Tensor]()
        for point in shared[POINTS]:  # the mean gradient there of each client's samples, [c, p], and their mean loss
            at = task.replicate(shaped(point, task.initial()), visits)
            gradient = 0.0 * flat(at, 1)
            loss = gradient[:, 0]
            for batch in task.batches(visits, self.batch, epochs=1).padded():
                found, each = task.gradients(at, batch)
                counts = torch.tensor(batch.sample_counts(), dtype=gradient.dtype)
                share = on_device(counts / held.to(gradient.dtype), gradient.device)
                gradient, loss = gradient + share[:, None] * flat(found, 1), loss + share * each
            gradients.append(gradient)
            losses.append(loss)
        sums = torch.stack(gradients, 1).double()
        if self.solve_at == "client":
            sums = solved(shared[INVERSE], sums)
        yield {"loss": (torch.stack(losses).mean(0), weight)}
        parts = {f"{SUMS}{k}": sums[:, k] for k in range(self.rank)} if self.pipelined else {SUMS: sums}
        for name, part in parts.items():
            yield {name: (part, weight)}
        return {}

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        if sums.invited:
            return self._weighted(task, state, sums)
        if state.extras["heard"] > 0:
            return self._descended(task, state)
        if self.solve_at == "client" and not state.shared[INVERSE].any():
            inverse, parts = torch.empty_like(state.shared[INVERSE]), []
            for columns, values, known in self._surrogates(task).inverses(state.shared[POINTS], *self._cut(task)):
                inverse[columns] = values
                parts.append(known)
            return ServerState(state.shared | {INVERSE: inverse}, {**state.extras, **conditioning(parts)})
        return state

    def _weighted(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        """Return the state with the weights that follow from what was sent; who is missing is taken for like the rest.

        Where nobody has sent anything, nothing follows, and nothing will. Arrays of r·p numbers are large: they are
        worked on in place.
        """
        names = [name for layer in reversed(self.layers(task)) for name in layer]
        if not all(sums.weight(name) for name in names):
            return replace(state, extras={**state.extras, "heard": -1.0})
        clients, surrogates, shared = int(task.federation.train_sizes.sum()), self._surrogates(task), state.shared
        weights, numbers = torch.empty_like(state.extras["weights"]), {"heard": 1.0}
        for row, name in zip(weights.view(len(names), -1), names):
            row.copy_(sums.mean(name).flatten())
        weights *= clients
        rest = surrogates.rest(shared[POINTS])
        if self.solve_at == "client":
            weights += solved(shared[INVERSE], rest)
        else:
            weights += rest
            numbers |= surrogates.solve(shared[POINTS], weights, *self._cut(task))
        weights += 1
        weights /= clients + surrogates.held.y.shape[1]
        return replace(state, extras={**state.extras, **numbers, "weights": weights})

    def _descended(self, task: Task, state: ServerState) -> ServerState:
        """Return the state some steps further down (eq. 42)."""
        surrogates, like, extras = self._surrogates(task), task.initial(), state.extras
        apart = task.penalty - surrogates.task.penalty
        theta, best = flat({name: state.shared[name] for name in like}), extras["best"]
        start, reach = flat(like), self.reach * self.scale * task.parameter_count**0.5
        least, taken, halted, norm = (extras[name] for name in ("least", "taken", "halted", "norm"))
        for _ in range(0 if halted else self.steps):
            slope = surrogates.gradient(theta, extras["weights"]) + apart * theta
            norm, far = float(slope.norm()), float((theta - start).norm()) > reach
            if norm <= least and not far:
                best, least = theta, norm
            if far or not norm <= self.growth * least:
                theta, norm, halted = best, least, 1.0
                break
            if norm <= self.tolerance:
                break
            theta = (theta - self.lr * slope).to(theta)
            taken += 1
        reached = {name: value.clone() for name, value in shaped(theta, like).items()}
        numbers = {"least": least, "norm": norm, "taken": taken, "halted": halted}
        return ServerState(state.shared | reached, {**extras, **numbers, "best": best})

    def _reweighted(self, task: Task) -> Task:
        return task.without_penalty() if self.penalty == "exact" else task

    def _surrogates(self, task: Task) -> Surrogates:
        shared = 1 + (self.solve_at == "client")  # inverses are held whole then
        bound = Bound.of(self.memory * MEGABYTE // shared, task.parameter_count, self.rank, task.dtype.itemsize)
        return Surrogates(self._reweighted(task), server_samples(task, WHO), self.rank, bound)

    def _cut(self, task: Task) -> tuple[float, float]:
        """Return the threshold of singular values, relative to the largest, and the damping."""
        return max(self.truncation, 10 * float(torch.finfo(task.dtype).eps)), self.damping

    def metrics(self, task: Task, state: ServerState) -> dict[str, float]:
        return {name: state.extras[name] for name in self.metric_columns}

    def warnings(self, task: Task, state: ServerState) -> dict[str, str]:
        warnings, surrogates = {}, self._surrogates(task)
        if bent := kinks(task):
            bent_why = "the loss is not smooth in the data, the theory does not cover it"
            warnings["not-smooth"] = f"{', '.join(bent)}: {bent_why}"
        labels = surrogates.samples.y
        missing = sorted(set(range(task.federation.classes)) - set(labels.flatten().tolist()))
        if missing and not labels.is_floating_point():
            held = f"the server's {self.rank} samples"
            warnings["missing-classes"] = f"none of {held} is of class {missing}: expected all"
        if state.extras["heard"] < 0:
            warnings["unheard"] = "no client's sums arrived in the only round that is for them: nothing can be learnt"
        if cut := state.extras["truncated"]:
            warnings["singular"] = (
                f"the server's gradients are linearly dependent in {cut:.0f} of {task.parameter_count} coordinates: "
                f"singular values below {self._cut(task)[0]:.1g} of the largest were left out "
                f"(worst condition number {state.extras['worst_condition']:.3g})"
            )
        if state.extras["halted"]:
            warnings["halted"] = "the inexact gradient grew or led too far: the descent went back to where it was least"
        return warnings

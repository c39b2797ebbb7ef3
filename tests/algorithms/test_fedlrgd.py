"""FedLRGD: weights under which the server's samples stand in for all others, and the descent on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, Toy, planned
from hpcfl import store
from hpcfl.algorithms.base import ServerState
from hpcfl.algorithms.fedlrgd import low_rank
from hpcfl.algorithms.fedlrgd.algorithm import INVERSE, POINTS, FedLrgd
from hpcfl.algorithms.fedlrgd.low_rank import Bound, Known, flat, inverted, shaped
from hpcfl.base.errors import UsageError
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.config.presets import presets
from hpcfl.data import ClientData
from hpcfl.launch.request import run_request
from hpcfl.launch.run import launch
from hpcfl.learning.derivatives import per_sample_gradients
from hpcfl.learning.task import Task
from hpcfl.models.glm import Glm
from hpcfl.models.mlp import Mlp
from hpcfl.schedule.plan import Plan
from hpcfl.testing.runs import play, recorded, same

SIZES = [3, 7, 5]


@dataclass(frozen=True, eq=False)
class Served(Toy):
    own: tuple[np.ndarray, np.ndarray]

    def server_train(self):
        return self.own


def problem(server: int = 8, targets: bool = True, dimension: int = 2, seed: int = 0) -> Served:
    """Clients with features around centres of their own in the unit cube, a server with features all over it."""
    rng = np.random.default_rng(seed)

    def samples(count: int, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(low, high, (count, dimension)).astype(np.float32)
        y = (np.sin(3 * x.sum(1)) + 0.1 * rng.normal(size=count)).astype(np.float32)
        return x, y if targets else (y > 0.5).astype(np.int64)

    held = []
    for client, size in enumerate(SIZES):
        x, y = samples(size, 0.2 * client, 0.2 * client + 0.5)
        held.append(ClientData(x, y, x[:0], y[:0]))
    none = np.zeros(len(SIZES), dtype=np.int64)
    own = samples(server, 0.0, 1.0)
    return Served(1 if targets else 2, np.array(SIZES), none, [(dimension,)] * len(SIZES), held, own)


def squared(server: int = 8, **more: Any) -> Task:
    """A linear model with a squared loss: gradients of rank d + 2 in the data."""
    return Task(Mlp(hidden=()), problem(server, **more), 1, precision="double")


def logistic(server: int = 8, ridge: float = 0.1, **more: Any) -> Task:
    return Task(Glm(link="logistic", ridge=ridge), problem(server, targets=False, **more), 1, precision="double")


def together(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """All training samples, the server's first."""
    parts = [task.federation.server_train(), *((c.train_features, c.train_labels) for c in task.federation.held)]
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts))
    return x.double(), y.double() if y.is_floating_point() else y


def slope(task: Task, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The exact gradient of the objective over all samples, by one pass."""
    x, y = together(task)
    whole = task.server_batch()
    batch = type(whole)(x[None], y[None], None, whole.key)
    found, _ = task.gradients({name: value[None] for name, value in state.items()}, batch)
    return {name: value[0] for name, value in found.items()}


def descended(algorithm: FedLrgd, task: Task, rounds: int, per_chunk: int | None = None) -> Rounds:
    """Rounds in memory: those before the clients', theirs, and so many of descent."""
    found = Rounds(algorithm, task, per_chunk)
    for number in range(rounds):
        depth = np.ones(len(SIZES)) if algorithm.invites(number) else None
        layers = len(found.layers)
        found.step(Plan.nobody(number, layers) if depth is None else planned(depth.astype(int), layers, number))
    return found


@pytest.mark.parametrize("rank", [4, 6])
@pytest.mark.parametrize("server", [6, 9])
def test_equals_exact_descent_where_the_gradients_are_of_so_low_a_rank(rank: int, server: int) -> None:
    task = squared(server)
    found = descended(FedLrgd(rank=rank, lr=0.2, steps=10), task, 4)
    exact = task.initial()
    for _ in range(30):
        exact = {name: value - 0.2 * slope(task, exact)[name] for name, value in exact.items()}
    for name, value in exact.items():
        np.testing.assert_allclose(found.state[name], value, atol=1e-6)
    assert found.server.extras["taken"] == 30
    assert (rank > 4) == bool(found.server.extras["truncated"])  # rank d + 2 = 4: more samples depend on each other


def test_is_another_where_the_rank_is_too_low() -> None:
    task = squared()
    found = descended(FedLrgd(rank=2, lr=0.2, steps=10), task, 2).state
    exact = {name: value - 0.2 * slope(task, task.initial())[name] for name, value in task.initial().items()}
    assert max(float((found[name] - exact[name]).abs().max()) for name in exact) > 1e-3


def test_weights_reproduce_all_gradients_at_every_point() -> None:
    task = logistic()
    state = descended(FedLrgd(rank=5), task, 1).server
    like = task.initial()
    for point in state.shared[POINTS]:
        own = per_sample_gradients(task, shaped(point, like), task.server_batch())
        found = (flat(own, 1)[:5] * state.extras["weights"]).sum(0)
        np.testing.assert_allclose(found, flat(slope(task, shaped(point, like))), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("penalty", ["reweighted", "exact"])
@pytest.mark.parametrize("server", [5, 8])
def test_clients_and_server_solve_alike(penalty: str, server: int) -> None:
    task = logistic(server)
    keys = {"rank": 5, "lr": 0.5, "steps": 20, "penalty": penalty}
    one, other = (
        descended(FedLrgd(solve_at=where, **keys), task, 3 + late) for where, late in (("server", 0), ("client", 1))
    )
    worst = float(one.server.extras["worst_condition"])
    np.testing.assert_allclose(one.server.extras["condition"], other.server.extras["condition"], rtol=1e-6)
    for name in task.initial():
        np.testing.assert_allclose(one.state[name], other.state[name], atol=max(1e-8, 1e3 * worst * 2e-16))


@pytest.mark.parametrize("solve_at", ["server", "client"])
def test_pipelined_equals_single_to_the_bit(solve_at: str) -> None:
    task = logistic()
    one, other = (
        descended(FedLrgd(rank=5, solve_at=solve_at, pipelined=each), task, 4, per_chunk=2).server
        for each in (False, True)
    )
    for here, there in ((one.shared, other.shared), (one.extras, other.extras)):
        assert here.keys() == there.keys()
        for name in here:
            assert torch.equal(torch.as_tensor(here[name]), torch.as_tensor(there[name])), name


def test_sends_r_numbers_per_coordinate_and_no_inverses() -> None:
    task = logistic()
    for algorithm, messages in ((FedLrgd(rank=5), 1), (FedLrgd(rank=5, pipelined=True), 5)):
        groups = algorithm.layout(task)[1:]
        assert len(groups) == messages
        assert sum(np.prod(block.shape) for group in groups for block in group.values()) == 5 * 3
        served = algorithm.init_server(task).values()
        assert sum(value.numel() for value in served) == 3 + 5 * 3  # θ and r points
    assert FedLrgd(rank=5, solve_at="client").init_server(task)[INVERSE].numel() == 3 * 25


def test_batches_change_nothing_but_last_bits() -> None:
    task = logistic()
    whole, parts = (descended(FedLrgd(rank=4, batch=size), task, 1).now.extras["weights"] for size in (0, 2))
    np.testing.assert_allclose(whole, parts, rtol=1e-6)


def test_those_who_are_missing_are_taken_for_like_the_rest() -> None:
    task = logistic()
    rounds = Rounds(FedLrgd(rank=5, lr=0.5), task)
    rounds.step(planned([1, 2, 1], 1))  # client 1 is late
    own, _ = task.federation.server_train()
    like, held = task.initial(), task.federation.held
    for point in rounds.state[POINTS]:
        parts = [task.server_batch()] + [
            type(task.server_batch())(
                torch.from_numpy(each.train_features)[None].double(),
                torch.from_numpy(each.train_labels)[None],
                None,
                task.server_batch().key,
            )
            for each in (held[0], held[2])
        ]
        sums = [flat(per_sample_gradients(task, shaped(point, like), part), 1).sum(0) for part in parts]
        expected = (sums[0] + (sums[1] + sums[2]) * sum(SIZES) / (SIZES[0] + SIZES[2])) / (sum(SIZES) + len(own))
        gradients = flat(per_sample_gradients(task, shaped(point, like), task.server_batch()), 1)[:5]
        np.testing.assert_allclose((gradients * rounds.now.extras["weights"]).sum(0), expected, rtol=1e-9)


def test_nobody_answers_and_nothing_moves() -> None:
    task = logistic()
    rounds = Rounds(FedLrgd(rank=4), task)
    before = dict(rounds.state)
    rounds.step(planned([2, 2, 2], 1))
    rounds.step(Plan.nobody(1, 1))
    assert all(torch.equal(before[name], rounds.state[name]) for name in before)
    assert "nothing can be learnt" in rounds.job.algorithm.warnings(task, rounds.server)["unheard"]


# singular matrices


def twice(task: Task) -> Task:
    """The same problem, the server's first sample twice."""
    x, y = task.federation.own
    own = np.concatenate([x[:1], x]), np.concatenate([y[:1], y])
    fields = {
        name: getattr(task.federation, name) for name in ("classes", "train_sizes", "test_sizes", "shapes", "held")
    }
    return Task(Glm(link="logistic", ridge=0.1), Served(**fields, own=own), 1, precision="double")


@pytest.mark.parametrize("keys", [{}, {"damping": 1e-3}, {"solve_at": "client"}])
@pytest.mark.parametrize("alike", ["samples", "points"])
def test_singular_matrices_give_a_warning_and_a_finite_answer(alike: str, keys: dict[str, Any]) -> None:
    task = twice(logistic()) if alike == "samples" else logistic()
    algorithm = FedLrgd(rank=4, lr=0.5, scale=1.0 if alike == "samples" else 0.0, **keys)
    state = descended(algorithm, task, 4).server
    assert all(torch.isfinite(state.shared[name]).all() for name in task.initial())
    assert torch.isfinite(state.extras["weights"]).all()
    figures = algorithm.metrics(task, state)
    assert figures["truncated"] == 3
    assert figures["worst_condition"] > 1e12
    assert "linearly dependent in 3 of 3" in algorithm.warnings(task, state)["singular"]


def test_regular_matrices_give_none() -> None:
    task = logistic()
    algorithm = FedLrgd(rank=4, lr=0.5)
    state = descended(algorithm, task, 3).server
    assert algorithm.warnings(task, state) == {}
    assert 1 <= algorithm.metrics(task, state)["condition"] <= algorithm.metrics(task, state)["worst_condition"] < 1e12


def test_pseudo_inverses_by_hand() -> None:
    given = torch.stack([torch.diag(torch.tensor(each)) for each in ([4.0, 2.0], [3.0, 0.0], [0.0, 0.0])]).double()
    values, (condition, cut) = inverted(given, 1e-12, 0.0)
    expected = [[[0.25, 0.0], [0.0, 0.5]], [[1 / 3, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    np.testing.assert_allclose(values, expected, atol=1e-15)
    np.testing.assert_array_equal(cut, [False, True, True])
    np.testing.assert_array_equal(condition, [2.0, np.inf, np.inf])
    damped = inverted(given[:1], 1e-12, 0.5)[0][0]  # s / (s² + (0.5 · 4)²)
    np.testing.assert_allclose(damped, [[4 / 20, 0.0], [0.0, 2 / 8]])


# memory


def test_matrices_are_worked_through_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(Mlp(hidden=(40,)), problem(10, dimension=8), 1, precision="double")
    algorithm = FedLrgd(rank=10, memory=1, steps=1, lr=0.1)
    whole = descended(algorithm.model_copy(update={"memory": 100}), task, 2).now.extras
    made: list[int] = []

    def measured(matrices: torch.Tensor, *more: float) -> tuple[torch.Tensor, Known]:
        made.append(matrices.nbytes)
        return inverted(matrices, *more)

    monkeypatch.setattr(low_rank, "inverted", measured)
    parts = descended(algorithm, task, 2).now.extras
    p = sum(value.numel() for value in task.initial().values())
    assert sum(made) == 8 * p * 100
    held = Bound.of(2**20, p, 10, 8)
    assert len(made) > low_rank.PARTS * (p // held.coordinates)
    assert max(made) == 8 * 100 * (held.coordinates // low_rank.PARTS)
    np.testing.assert_allclose(parts["weights"], whole["weights"], rtol=1e-6, atol=1e-9)


def test_bound_by_hand() -> None:
    each = 4 * 8 * 1000  # of one sample: p numbers, four times
    assert Bound.of(2**20, p=1000, r=20, itemsize=8) == Bound((2**20 - 16 * each) * 2 // 3 // (8 * 400), 16)
    assert Bound.of(2**30, p=1000, r=20, itemsize=8) == Bound((2**30 - 20 * each) * 2 // 3 // (8 * 400), 20)
    assert Bound.of(1, p=1000, r=20, itemsize=8) == Bound(1, 1)


# the descent


Gradient = Callable[[torch.Tensor], torch.Tensor]
Descend = Callable[..., ServerState]


@pytest.fixture
def descend(monkeypatch: pytest.MonkeyPatch) -> Descend:
    """Lets the server descend from where a method of one tensor begins, or has come to, along a gradient."""

    def go(start: torch.Tensor, gradient: Gradient, state: ServerState | None = None, **keys: Any) -> ServerState:
        task: Any = SimpleNamespace(penalty=0.0, parameter_count=len(start), initial=lambda: {"w": start})
        along = SimpleNamespace(task=task, gradient=lambda at, _: gradient(at))
        monkeypatch.setattr(FedLrgd, "_surrogates", lambda *_: along)
        begun = {"weights": None, "best": start, "least": inf, "taken": 0.0, "halted": 0.0, "norm": 0.0, "heard": 1.0}
        return FedLrgd(**keys).step(task, state or ServerState({"w": start}, begun), SimpleNamespace(invited=0))

    return go


def test_descends_as_far_as_it_is_told(descend: Descend) -> None:
    start = torch.tensor([2.0, -1.0], dtype=torch.float64)
    state = descend(start, lambda at: at, steps=3, lr=0.5)
    np.testing.assert_array_equal(state.shared["w"], start / 8)
    assert (state.extras["taken"], state.extras["halted"]) == (3, 0)
    state = descend(start, lambda at: at, state, steps=100, lr=0.5, tolerance=0.01)
    assert state.extras["norm"] <= 0.01 < 2 * state.extras["norm"]
    again = descend(start, lambda at: at, state, steps=100, lr=0.5, tolerance=0.01)
    assert again.extras["taken"] == state.extras["taken"]


def test_goes_back_where_it_diverges(descend: Descend) -> None:
    start = torch.tensor([1.0], dtype=torch.float64)
    state = descend(start, lambda at: -at, steps=100, lr=0.5, growth=4.0)  # 1, 1.5, 2.25, 3.375, 5.0625
    assert (float(state.shared["w"]), state.extras["halted"], state.extras["taken"]) == (1.0, 1, 4)
    state = descend(start, lambda at: at, state, steps=100, lr=0.5, growth=4.0)
    assert (float(state.shared["w"]), state.extras["taken"]) == (1.0, 4)
    lost = descend(start, lambda at: at * float("nan"), steps=5, lr=0.5, growth=4.0)
    assert (float(lost.shared["w"]), lost.extras["halted"]) == (1.0, 1)


def test_goes_back_where_it_is_led_too_far(descend: Descend) -> None:
    start = torch.tensor([1.0], dtype=torch.float64)
    state = descend(start, lambda at: -1 / at, steps=100, lr=1.0, growth=4.0, reach=2.0)  # 1, 2, 2.5, 2.9, 3.24…
    assert (round(float(state.shared["w"]), 6), state.extras["halted"], state.extras["taken"]) == (2.9, 1, 4)


# whole runs


def values(**algorithm: Any) -> dict[str, Any]:
    return {
        **{"rounds": 5, "clients": 5, "seed": 4, "precision": "double", "batch_clients": 2},
        **{"evaluate": {"every": 1}, "checkpoint": {"every": 2, "keep": 5}},
        "algorithm": {"name": "fedlrgd", "rank": 5, "lr": 0.7, **algorithm},
        "data": {"name": "unit_cube", "dimension": 2, "labels": 2, "samples": 12, "server": 7, "heterogeneity": 0.8},
        "model": {"name": "glm", "link": "logistic", "ridge": 0.1},
        "speed": {"model": "none"},
        "oracle": {"record": True, "phi": 100.0},
    }


@pytest.mark.mpi
def test_same_on_all_ranks(world: Any, shared_dir: Path) -> None:
    """In both clocks: chunks of single clients, as in real time, are the same there."""
    single = values() | {"batch_clients": False, "threads": 1}
    one = play(world, single, shared_dir / "one", None)
    same(play(world, single, shared_dir / "ranks", world.comm), one)
    if world.size > 1:
        real = play(world, single | {"clock": "wall"}, shared_dir / "wall", world.comm)
        if world.rank == 0:
            assert summary(real)["state_sha256"] == summary(one)["state_sha256"]


@pytest.mark.parametrize("preset", sorted(name for name in presets() if name.startswith("fedlrgd-")))
def test_clients_solve_as_the_server_does_on_every_preset(preset: str, tmp_path: Path) -> None:
    """Two rounds of descent each; the inverses, which begin with 0, are no divergence however large they are."""
    seldom = "evaluate.every=100", "evaluate.objective=false", "oracle.record=false"

    def ended(where: str, rounds: int) -> Any:
        run, keys = tmp_path / where, (f"algorithm.solve_at={where}", f"rounds={rounds}", *seldom)
        launch(lambda: run_request(preset, keys, run, None, resume=False, quiet=True), None)
        return store.load(store.latest(run), personal=False)  # type: ignore[arg-type]

    server, client = ended("server", 3), ended("client", 4)
    within = 100 * 2.2e-16 * server.extras["worst_condition"]
    np.testing.assert_allclose(client.extras["worst_condition"], server.extras["worst_condition"], rtol=1e-6)
    pairs = [(server.extras["weights"], client.extras["weights"])]
    pairs += [(value, client.shared[name]) for name, value in server.shared.items()]
    for one, other in pairs:
        assert np.linalg.norm(one - other) <= within * np.linalg.norm(one)


def test_run_file_has_what_is_to_be_known(solo: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = play(solo, values(scale=0.0), tmp_path / "run", None)  # all ϑ alike, and no way to go from there
    data = store.open_run(run)
    np.testing.assert_array_equal(data["halted"].values, [0, 1, 1, 1, 1])
    assert (data["truncated"].values == 3).all()
    assert (data["norm"].values[1:] == data["norm"].values[1]).all()
    assert data["norm"].values[1] > 0
    np.testing.assert_array_equal((data["cohort"].values == 1).sum(1), [5, 0, 0, 0, 0])
    said = [event for event in store.events(run) if event["kind"] == "singular"]
    assert len(said) == 1
    assert "linearly dependent" in said[0]["text"]


@pytest.mark.parametrize("solve_at", ["server", "client"])
def test_costs_what_the_paper_says(solo: Any, tmp_path: Path, solve_at: str) -> None:
    """r = 5 of R = 7 samples of the server, s = 12 of each of m = 5 clients, 10 steps a round, φ = 100.

    The server's own sums by the other 2 samples, an epoch more where clients solve, are not in the paper: it has R = r.
    """
    data = store.open_run(play(solo, values(solve_at=solve_at), tmp_path / "run", None))
    r, rest, s, m, steps = 5, 2, 12, 5, 10 * 5
    if solve_at == "server":
        expected = {"server_gradients": [r * r + rest * r, *[steps] * 4], "gradients": [r * s, 0, 0, 0, 0]}
        expected |= {"epochs_a": [1, 0, 0, 0, 0], "epochs_b": [1, 1, 0, 0, 0], "epochs_c": [r - 1, 0, 0, 0, 0]}
        expected["taken"] = [0, 10, 20, 30, 40]
    else:
        expected = {"server_gradients": [r * r, rest * r, *[steps] * 3], "gradients": [0, r * s, 0, 0, 0]}
        expected |= {"epochs_a": [0, 1, 0, 0, 0], "epochs_b": [1, 1, 1, 0, 0], "epochs_c": [0, r - 1, 0, 0, 0]}
        expected["taken"] = [0, 0, 10, 20, 30]
    for name, counts in expected.items():
        np.testing.assert_array_equal(data[name].values, counts, err_msg=name)
    descent = steps * (4 if solve_at == "server" else 3)
    assert data["oracle"].values.sum() == r * r + rest * r + r * s + descent + 100 * m * r


@pytest.mark.parametrize("solve_at", ["server", "client"])
def test_gamma_and_epochs_are_those_of_theorem_2(solo: Any, tmp_path: Path, solve_at: str) -> None:
    """m = 5 clients of s = 12 samples, r = 5 of R = 5 samples: r² + rs + rS + φ m r in r + 2 epochs (Algorithm 1)."""
    config = values(solve_at=solve_at, steps=6)
    config["data"] = config["data"] | {"server": 5}
    data = store.open_run(play(solo, config, tmp_path / "run", None))
    steps = 6 * (4 if solve_at == "server" else 3)  # S: the rounds without clients that follow
    assert data["oracle"].values.sum() == 25 + 5 * 12 + 5 * steps + 100 * 5 * 5
    assert [int(data[f"epochs_{kind}"].sum()) for kind in "abc"] == [1, 2, 5 - 1]
    time = 2 * (25 + 5 * 12 + 5 * steps) + np.log(5) + 100 * 5 * 5
    np.testing.assert_allclose(data["running_time"].values.sum(), time, rtol=1e-14)


def test_gamma_of_fedave_is_that_of_theorem_3(solo: Any, tmp_path: Path) -> None:
    """T = 5 epochs of b = 7 steps on one sample each, by τm = 5 of m = 5 clients: T (b + φ τm), all of type A."""
    config = values()
    config["algorithm"] = {"name": "fedavg", "epochs": 0, "steps": 7, "batch": 1}
    data = store.open_run(play(solo, config, tmp_path / "run", None))
    assert data["oracle"].values.sum() == 5 * (7 + 100 * 5)
    assert [int(data[f"epochs_{kind}"].sum()) for kind in "abc"] == [5, 0, 0]


def test_recorded_alike_pipelined(solo: Any, tmp_path: Path) -> None:
    one, other = (recorded(play(solo, values(pipelined=each), tmp_path / str(each), None)) for each in (False, True))
    for name in ("norm", "condition", "test_loss", "message_bytes", "loss"):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# what is refused


def refused(match: str, **more: Any) -> None:
    table = values()
    for key, value in more.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    config = from_table(table)
    with pytest.raises(UsageError, match=match):
        config.check(None)


def test_refuses_more_samples_than_the_server_has() -> None:
    refused(r"algorithm.rank: expected at most 7, .* server holds, got 9; did you mean 7", algorithm={"rank": 9})


def test_theory_needs_its_assumptions() -> None:
    asked = {"theory": True}
    refused("strongly convex", algorithm=asked, model={"ridge": 0.0})
    late = {"close": "deadline", "deadline": 1.0}
    refused("every client's sums", algorithm=asked, participation=late, speed={"model": "exponential"})
    kinked = Task(Mlp(hidden=(3,)), problem(), 1, precision="double")
    kinked.penalty = 0.1
    with pytest.raises(UsageError, match="smooth in the data, but there is ReLU"):
        FedLrgd(rank=3, theory=True).layout(kinked)
    outside = logistic()
    outside.federation.held[1].train_features[2, 0] = 1.5
    with pytest.raises(UsageError, match=r"those of client 1 reach from .* to 1.5"):
        FedLrgd(rank=3, theory=True).layout(outside)
    FedLrgd(rank=3, theory=True).layout(logistic())


def test_tells_of_kinks_and_of_missing_classes() -> None:
    kinked = Task(Mlp(hidden=(3,)), problem(), 1, precision="double")
    algorithm = FedLrgd(rank=2)
    assert "ReLU" in algorithm.warnings(kinked, Rounds(algorithm, kinked).server)["not-smooth"]
    task = logistic()
    task.federation.own[1][:2] = 1
    assert "[0]" in algorithm.warnings(task, Rounds(algorithm, task).server)["missing-classes"]


@pytest.mark.parametrize(("solve_at", "fits"), [("server", 13), ("client", 2)])
def test_says_which_rank_fits(solve_at: str, fits: int) -> None:
    task = Task(Mlp(hidden=(908,)), problem(40, dimension=9), 1)  # p = 9989
    p = sum(value.numel() for value in task.initial().values())
    bound = 2**20 // 8
    assert fits == (bound // p if solve_at == "server" else int((bound / p / 2) ** 0.5))
    with pytest.raises(UsageError, match=rf"p = {p}.*did you mean rank = {fits}\?$"):
        FedLrgd(rank=30, memory=1, solve_at=solve_at).layout(task)
    FedLrgd(rank=fits, memory=1, solve_at=solve_at).layout(task)
    large = Task(Mlp(hidden=(2000,)), problem(9, dimension=9), 1)  # p = 22001: gradients alone take more than 1 MB
    with pytest.raises(UsageError, match=r"did you mean memory = (\d+)\?$") as refusal:
        FedLrgd(rank=8, memory=1, solve_at=solve_at).layout(large)
    memory = int(str(refusal.value).split()[-1].rstrip("?"))
    FedLrgd(rank=8, memory=memory, solve_at=solve_at).layout(large)
    with pytest.raises(UsageError, match="did you mean "):
        FedLrgd(rank=8, memory=memory - 1, solve_at=solve_at).layout(large)


def test_refuses_a_random_loss_and_a_server_without_samples() -> None:
    with pytest.raises(UsageError, match="dropout in fc1"):
        FedLrgd(rank=2).layout(Task(Mlp(hidden=(3,), dropout=0.5), problem(), 1))
    refused("got 5; did you mean data.server = 5 with data.deal = false", data={"deal": True})
    first = {"close": "first", "first": 2}
    refused("invites clients once", participation=first, doubling={"when": "rounds", "rounds": 1})

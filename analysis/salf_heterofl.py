"""HeteroFL in the SALF paper's Table II, CNN: what makes it fall from .88 to .43, one choice changed at a time.

    python analysis/salf_heterofl.py --stragglers 0.9 --cut classes --mean kept

A loop in plain PyTorch; of hpcfl are only the preset's data, split and first model. Stragglers are drawn once per run.
They hold the first half of each hidden layer's units (``--cut hidden``), and of the classes too (``classes``; the
others' outputs are 0 then). Or they train the whole model, and only its convolutions (``first``) or linear layers
(``last``) count. The server takes each coordinate's mean over those who hold it (``--mean holders``), or over all
users: who does not hold it counts as the old value (``kept``) or as 0 (``zero``). All take one step of batch 16 from
the same model, so that the mean over users of one kind is a step on all their samples. Per seed: the mean test accuracy
over the last 10 rounds. Costs 15 s of CPU per seed. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
from math import ceil
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from study_lines import half_interval
from torch import Tensor
from torch.nn import functional as F

from hpcfl.base.types import Ints
from hpcfl.config import load
from hpcfl.engine.job import Job

State = dict[str, Tensor]
Held = dict[str, tuple[slice, ...]]
PRESET, BATCH, LAST = "table2-cnn-vanilla", 16, 10


def outputs(params: State, x: Tensor, rate: float = 1.0) -> Tensor:
    """Return what the CNN says; what hidden layers put out is divided by `rate`, and classes cut off have 0."""
    conv1, bias1, conv2, bias2, fc1, bias3, fc2, bias4 = params.values()
    x = F.relu(F.max_pool2d(F.conv2d(x, conv1, bias1) / rate, 2))
    x = F.relu(F.max_pool2d(F.conv2d(x, conv2, bias2) / rate, 2))
    x = F.linear(F.relu(F.linear(x.flatten(1), fc1, bias3) / rate), fc2, bias4)
    return F.pad(x, (0, 10 - x.shape[1]))


def held(model: State, cut: str, rate: float) -> Held:
    """Return which part of each tensor counts of a straggler; tensors that do not count are left out."""
    if cut in ("first", "last"):
        names = list(model)[:4] if cut == "first" else list(model)[4:]
        return {name: tuple(map(slice, model[name].shape)) for name in names}
    before, found = 0, Held()  # units of the layer before
    for name, value in model.items():
        sizes = [ceil(rate * value.shape[0]), *value.shape[1:]]
        if cut == "hidden" and name in list(model)[-2:]:
            sizes[0] = value.shape[0]
        if value.dim() > 1 and before:
            sizes[1] = value.shape[1] // before * ceil(rate * before)
        before, found[name] = value.shape[0], tuple(map(slice, sizes))
    return found


def averaged(model: State, whole: State, users: int, part: State, late: int, mean: str, places: Held) -> State:
    """Return the server's mean of so many users' whole models and so many stragglers' parts."""
    after = {}
    for name, old in model.items():
        total, count = users * whole[name], torch.full_like(old, users)
        if name in places:
            total[places[name]] += late * part[name]
            count[places[name]] += late
        if mean == "kept":
            total = total + (users + late - count) * old
        after[name] = torch.where(count > 0, total / count, old) if mean == "holders" else total / (users + late)
    return after


def step(params: State, x: Tensor, y: Tensor, lr: float, rate: float, momentum: float, velocity: State) -> State:
    """Return the model after a step on these samples; `velocity` is changed in place."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = F.cross_entropy(outputs(leaves, x, rate), y)
    for name, slope in zip(params, torch.autograd.grad(loss, list(leaves.values()))):
        velocity[name] = momentum * velocity[name] + slope if name in velocity else slope
    return {name: value - lr * velocity[name] for name, value in params.items()}


def accuracies(asked: argparse.Namespace, seed: int) -> list[float]:
    """Return the test accuracies of one run's last rounds."""
    config = load(PRESET, {"seed": seed})
    task = Job.of(config, asked.data_dir, 1).task
    users = [task.federation.client(user) for user in range(config.clients)]
    samples = [(torch.tensor(user.train_features), torch.tensor(user.train_labels)) for user in users]
    test = [torch.tensor(values) for values in task.federation.server_test() or ()]
    model, rng, found = dict(task.initial()), np.random.default_rng(seed), []
    late, order = round(asked.stragglers * len(users)), rng.permutation(len(users))
    places, velocities = held(model, asked.cut, asked.rate), (State(), State())
    rate = asked.rate if asked.scaler else 1.0

    def drawn(who: Ints) -> tuple[Tensor, Tensor]:
        picked = [(user, rng.choice(len(samples[user][1]), BATCH, replace=False)) for user in who]
        x, y = zip(*((samples[user][0][rows], samples[user][1][rows]) for user, rows in picked))
        return torch.cat(x), torch.cat(y)

    for number in range(asked.rounds):
        if asked.redraw:
            order = rng.permutation(len(users))
        narrow = asked.cut in ("hidden", "classes")
        part = {name: model[name][place] for name, place in places.items()} if narrow else model
        whole = step(model, *drawn(order[late:]), asked.lr, 1.0, asked.momentum, velocities[0])
        part = step(part, *drawn(order[:late]), asked.lr, rate, asked.momentum, velocities[1])
        model = averaged(model, whole, len(users) - late, part, late, asked.mean, places)
        if number >= asked.rounds - LAST:
            tested = {name: model[name][places[name]] for name in model} if asked.tested == "part" else model
            with torch.no_grad():
                right = outputs(tested, test[0], rate if asked.tested == "part" else 1.0).argmax(1) == test[1]
            found.append(float(right.float().mean()))
    return found


def main() -> None:
    """Run, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stragglers", type=float, default=0.9, help="their share of the 30 users [0.9]")
    parser.add_argument("--rate", type=float, default=0.5, help="width of what stragglers hold [0.5]")
    parser.add_argument("--cut", choices=("hidden", "classes", "first", "last"), default="hidden")
    parser.add_argument("--mean", choices=("holders", "kept", "zero"), default="holders")
    parser.add_argument(
        "--scaler", action="store_true", help="divide what stragglers' hidden layers put out by the rate"
    )
    parser.add_argument("--momentum", type=float, default=0.0, help="kept from visit to visit [0]")
    parser.add_argument("--lr", type=float, default=0.1, help="step size [0.1]")
    parser.add_argument("--redraw", action="store_true", help="draw stragglers anew in each round")
    parser.add_argument("--tested", choices=("whole", "part"), default="whole")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HPCFL_DATA"), help="folder of the data sets")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = [accuracies(asked, seed) for seed in asked.seeds]
    ends = [fmean(run) for run in runs]
    found = {"accuracy": ends, "mean": fmean(ends), "half": half_interval(ends), "last": [run[-1] for run in runs]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

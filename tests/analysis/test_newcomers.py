"""The script of newcomers' curves, on small runs: its figures computed again from what it is made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.scripts import script
from hpcfl.commands.adapt import adapt_request, adapted
from hpcfl.testing.runs import play, table

HELD = [1, 4, 6]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of a run that holds out three clients."""
    from hpcfl.testing.world import World

    keys = {
        "algorithm": {"name": "fedrep", "lr": 0.1, "batch": 0, "momentum": 0.5},
        "speed": {"model": "none"},
        "model": {"name": "mlp", "hidden": [16]},
    }
    values: dict[str, Any] = {**table("fedavg", "mlp", True, rounds=2, participation={"hold_out": HELD}), **keys}
    folder = tmp_path_factory.mktemp("runs")
    return [play(World(alone=True), {**values, "seed": seed}, folder / str(seed), None) for seed in (1, 2)]


def test_means_over_newcomers_and_seeds(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "newcomers.png"
    words = ["newcomers.py", *map(str, runs), "--epochs", "1,4", "-o", str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    script("newcomers").main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["newcomers"]
    assert (row["seeds"], row["newcomers"], row["epochs"]) == (2, 3, [0, 1, 4])
    assert row["gradients"] == [0, 1, 4]
    means = [adapted(adapt_request(run, None, "4", None, None))["mean"] for run in runs]
    assert row["served"][0] == pytest.approx(np.mean([mean["accuracy_before"] for mean in means]))
    last = [mean["accuracy_after"] for mean in means]
    assert (row["served"][2], row["served_sd"][2]) == pytest.approx((np.mean(last), np.std(last, ddof=1)))
    apart = np.subtract(row["served"], row["alone"])
    assert row["difference"] == pytest.approx(apart.tolist())
    assert picture.stat().st_size > 5000


def test_a_preset_is_run_without_every_fourth_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("hpcfl.run", lambda preset, settings, out, quiet: asked.append((preset, settings, out)))
    folders = script("newcomers").held_out("srpfl-fedrep-digits", tmp_path)
    held = {"participation.hold_out": [3, 7, 11, 15, 19]}
    assert asked == [
        ("srpfl-fedrep-digits", {**held, "seed": seed}, folder) for seed, folder in enumerate(folders, start=1)
    ]
    assert len(folders) == 5


def test_alone_is_the_plain_loop(runs: list[Path]) -> None:
    """On all samples at once, so that no order matters."""
    import torch
    from torch.nn import functional

    import hpcfl
    from helpers.toys import plain

    (found,) = script("newcomers").accuracies_alone(runs[0], HELD, [3], None)
    task, right = hpcfl.open_models(runs[0]).task, []
    for client in HELD:
        own, net = task.federation.client(client), plain(task, task.initial())
        steps = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        net.eval()
        for _ in range(3):
            steps.zero_grad()
            x, y = torch.from_numpy(own.train_features), torch.from_numpy(own.train_labels)
            functional.cross_entropy(net(x), y).backward()
            steps.step()
        outputs = net(torch.from_numpy(own.test_features)).detach().numpy()
        right.append((outputs.argmax(1) == own.test_labels).mean())
    assert found == pytest.approx(np.mean(right), abs=1e-6)

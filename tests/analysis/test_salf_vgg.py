"""The script of SALF's Figures 6 and 7, with VGG of one channel and a few images."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from hpcfl import open_run

SCRIPT = Path(__file__).parents[2] / "analysis" / "salf_vgg.py"


def mnist(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", 60), ("t10k", 20)):
        images, labels = rng.integers(256, size=(count, 28, 28)), np.arange(count) % 10
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
            with gzip.open(folder / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(head + values.astype(np.uint8).tobytes())


def test_accuracies_are_those_of_its_runs(tmp_path: Path) -> None:
    mnist(tmp_path / "mnist")
    words = ["--methods", "salf", "heterofl", "--rounds", "2", "--every", "1", "--data", "mnist32"]
    words += ["--stragglers", "0.7", "--set", "model.width=1", "clients=3"]
    command = [sys.executable, str(SCRIPT), *words, "--data-dir", str(tmp_path), "--out", str(tmp_path / "runs")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    rows = {row["method"]: row for row in json.loads(said)["salf_vgg"]}
    for method in ("salf", "heterofl"):
        (folder,) = (tmp_path / "runs").glob(f"{method}-*-1")
        data = open_run(folder)
        accuracy, config = data["accuracy"].values.round(4).tolist(), json.loads(data.attrs["config"])
        late = {"salf": config["speed"].get("stragglers"), "heterofl": config["algorithm"].get("shares", [0, 0])[1]}
        assert late[method] == rows[method]["stragglers"] == 0.7
        assert rows[method]["rounds"] == [1, 2]
        assert rows[method]["accuracy"] == accuracy
        assert np.isfinite(accuracy).all()

"""Methods that need an embedding, on a module from outside whose submodule embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.testing.runs import play, same

NAMES = {"embed1": "encoder.1", "embed2": "encoder.3", "head": "head.1"}
PLAIN: dict[str, Any] = {
    "rounds": 3,
    "clients": 4,
    "seed": 5,
    "batch_clients": 2,
    "evaluate": {"every": 1},
    "speed": {"model": "none"},
    "data": {"name": "digits", "train_samples": 120},
}
FLIC = {"name": "flic", "epochs": 2, "pretrain": 1, "lambda1": 0.1, "lambda2": 0.1, "batch": 10}
LATENT = {"name": "latent", "widths": [8], "dimension": 4}
OURS: dict[str, Any] = {"model": {"name": "helpers.modules:Encoded"}, "task": {"embedding": "encoder"}}


def starts(folder: Path) -> dict[str, str]:
    """Write the same initial values for the latent model and for the module."""
    rng = np.random.default_rng(0)
    sizes = {"embed1": (8, 64), "embed2": (4, 8), "head": (10, 4)}
    with h5py.File(folder / "latent.h5", "w") as ours, h5py.File(folder / "module.h5", "w") as theirs:
        for layer, shape in sizes.items():
            for kind, values in (("weight", rng.normal(size=shape) / 4), ("bias", rng.normal(size=shape[0]) / 4)):
                ours[f"{layer}.{kind}"] = theirs[f"{NAMES[layer]}.{kind}"] = values.astype(np.float32)
    return {name: str(folder / f"{name}.h5") for name in ("latent", "module")}


@pytest.mark.parametrize("inside", ["fedrep", "fedavg-ft"])
def test_flic_learns_as_on_the_latent_model(inside: str, tmp_path: Path) -> None:
    initial = starts(tmp_path)
    method = {"algorithm": FLIC | {"inside": inside, "local_step": "joint"}}
    latent = PLAIN | method | {"model": LATENT | {"initial": initial["latent"]}}
    module = PLAIN | method | {"task": OURS["task"], "model": OURS["model"] | {"initial": initial["module"]}}
    one, other = (hpcfl.run(each, out=tmp_path / str(n), quiet=True) for n, each in enumerate((latent, module)))
    for column in ("loss", "client_test_loss"):
        np.testing.assert_allclose(other.data[column].values, one.data[column].values, rtol=2e-4, err_msg=column)
    means = [run.models.extras.get("anchor.means", run.models.shared.get("anchor.means")) for run in (one, other)]
    stacked = [run.models.shared for run in (one, other)]
    assert stacked[0].keys() - {"head.weight", "head.bias"} <= stacked[1].keys()
    assert means[0] is None or np.allclose(*means, rtol=1e-4)
    x = one.models.federation.client(1).test_features
    assert len(x)
    ours, theirs = (next(client for client in run.models if client.client == 1) for run in (one, other))
    np.testing.assert_allclose(theirs.embed(x), ours.embed(x), rtol=1e-3, atol=1e-4)


def test_fedhenn_aligns_what_the_submodule_gives(tmp_path: Path) -> None:
    initial = starts(tmp_path)
    method = {"algorithm": {"name": "fedhenn", "epochs": 1, "alignment": 20, "eta": 1.0}}
    mlp = PLAIN | method | {"model": LATENT | {"initial": initial["latent"]}}
    module = PLAIN | method | {"task": OURS["task"], "model": OURS["model"] | {"initial": initial["module"]}}
    one, other = (hpcfl.run(each, out=tmp_path / str(n), quiet=True) for n, each in enumerate((mlp, module)))
    for column in ("loss", "client_test_loss"):
        np.testing.assert_allclose(other.data[column].values, one.data[column].values, rtol=2e-4, err_msg=column)


@pytest.mark.mpi
def test_one_rank_equals_n(world: Any, solo: Any, shared_dir: Path) -> None:
    values = PLAIN | OURS | {"clients": 6, "algorithm": FLIC, "model": OURS["model"] | {"dropout": 0.2}}
    one = play(world, values, shared_dir / "one", None)
    same(play(world, values, shared_dir / "ranks", world.comm), one)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"task": {}}, "task.embedding: expected the submodule that embeds, since the model is no chain of layers"),
    "name": ({"task": {"embedding": "encodr"}}, "has no such submodule; did you mean 'encoder'?"),
    "twice": ({"task": {"embedding": "head.0"}, "model": {"name": "helpers.modules:Encoded", "besides": True}}, "dep"),
    "chain": ({"model": LATENT}, "task.embedding = 'encoder' has no meaning with model.name = 'latent': remove it, or"),
    "batch": (
        {"model": {"name": "helpers.modules:Normed"}, "task": {"embedding": "stem"}},
        "that do not depend on the",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line(case: str, tmp_path: Path) -> None:
    keys, said = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        hpcfl.run(PLAIN | OURS | {"algorithm": FLIC} | keys, out=tmp_path / "out", quiet=True)
    assert said in str(refused.value)

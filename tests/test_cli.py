"""The commands, as a user types them; and that nothing but the data is needed for a run without a launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from helpers.launcher import ROOT, alone, job, mpis
from hpcfl.commands.cli import main

GOLDEN = Path(__file__).parent / "golden" / "salf-digits.json"
FEW = ["--set", "rounds=3", "--set", "evaluate.every=1"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder, as a process alone, whoever else runs the tests."""
    monkeypatch.chdir(tmp_path)
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)


def shown(capsys: pytest.CaptureFixture[str], *runs: str) -> list[dict[str, Any]]:
    """Return what ``hpcfl show --json`` prints."""
    capsys.readouterr()
    assert main(["show", "--json", *runs]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_run_show_plot_seal_and_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "salf-digits", *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    (row,) = shown(capsys, "runs/salf-digits")
    assert row["status"] == "done"
    assert row["rounds"] == 3
    assert row["sim_seconds"] == pytest.approx(0.9)
    assert len(row["state_sha256"]) == 64
    assert f"accuracy {row['accuracy']:.4f}" in lines[-1]
    assert main(["plot", "runs/salf-digits", "-o", "picture.png"]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert main(["seal", "runs/salf-digits"]) == 0
    assert main(["resume", "runs/salf-digits"]) == 0
    assert "done already" in capsys.readouterr().out
    assert main(["show", "runs/salf-digits"]) == 0
    assert "salf-digits" in capsys.readouterr().out


def test_run_again_with_resume_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg-digits", *FEW, "--out", "one", "--quiet"]) == 0
    before = shown(capsys, "one")
    assert main(["run", "fedavg-digits", *FEW, "--out", "one", "--resume"]) == 0
    assert shown(capsys, "one") == before


def test_run_again_with_another_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg-digits", *FEW, "--out", "one", "--quiet"]) == 0
    before = shown(capsys, "one")
    other = ["run", "fedavg-digits", *FEW, "--set", "algorithm.lr=0.3", "--set", "seed=9", "--out", "one", "--resume"]
    assert main(other) == 2
    line = "hpcfl: 'one' holds a run with algorithm.lr = 0.1, expected 0.3; choose another --out\n"
    assert capsys.readouterr().err == line
    assert main(["run", "fedavg-digits", *FEW, "--set", "oracle.phi=7", "--out", "one", "--resume"]) == 2
    assert "holds a run with oracle.phi = None, expected 7.0;" in capsys.readouterr().err
    assert shown(capsys, "one") == before


def test_a_diverged_run_is_not_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    from hpcfl import store

    assert main(["run", "fedavg-digits", *FEW, "--out", "one", "--quiet"]) == 0
    store.write_status(Path("one"), "diverged", "round 2: layer1.weight is not finite")
    for words in (["resume", "one"], ["run", "fedavg-digits", *FEW, "--out", "one", "--resume"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("hpcfl: 'one' has diverged: round 2: layer1.weight is not finite; its last finite check")
    assert shown(capsys, "one")[0]["status"] == "diverged"
    assert not Path("one/lock").exists()


def failing(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    """Let the function at `where` raise; waiting for another rank to speak would never end."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("hpcfl.launch.failure.GIVE_UP_SECONDS", 1e9)
    monkeypatch.setattr(where, fail)


def test_a_second_failure_is_told_of_like_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, "hpcfl.engine.loop.evaluate", ArithmeticError("in a round"))
        assert main(["run", "salf-digits", *FEW, "--out", "one"]) == 1
        assert capsys.readouterr().err.count("ArithmeticError: in a round\n") == 2  # the line, the traceback's end
    with monkeypatch.context() as patch:
        failing(patch, "hpcfl.engine.loop.Job.of", ArithmeticError("before the rounds"))
        assert main(["resume", "one"]) == 1
        assert capsys.readouterr().err.count("ArithmeticError: before the rounds\n") == 2
    assert main(["resume", "one", "--quiet"]) == 0


def test_an_error_of_one_line_in_a_round_stays_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcfl.base.errors import RunError

    failing(monkeypatch, "hpcfl.engine.loop.evaluate", RunError("no more of this"))
    assert main(["run", "salf-digits", *FEW, "--out", "one"]) == 1
    assert capsys.readouterr().err == "hpcfl: no more of this\n"
    assert shown(capsys, "one")[0]["status"] == "failed"


def test_the_state_is_hashed_in_the_order_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    import hashlib

    assert main(["run", "salf-digits", *FEW, "--out", "one", "--quiet"]) == 0
    with h5py.File("one/checkpoints/round-000003/server.h5") as file:
        tensors = {name: file["shared"][name][...] for name in file["shared"]}
    bytes_ = b"".join(tensors[name].astype("<f4").tobytes() for name in sorted(tensors))
    assert shown(capsys, "one")[0]["state_sha256"] == hashlib.sha256(bytes_).hexdigest()


def test_the_run_folder_as_the_readme_reads_it() -> None:
    assert main(["run", "salf-digits", *FEW, "--out", "runs/two", "--quiet"]) == 0
    data = hpcfl.open_run("runs/two")
    assert dict(data.sizes) == {"round": 3, "client": 8, "layer": 3, "rank": 1}
    assert data["accuracy"].dropna("round").sizes["round"] == 3
    assert data["sim_seconds"].dims == ("round",)
    with h5py.File("runs/two/run.h5") as file:
        np.testing.assert_array_equal(file["arrived"][:], data["arrived"])
        assert file["depth"].dims[1][0][:].tolist() == list(range(8))
        assert json.loads(file.attrs["config"])["algorithm"]["name"] == "salf"


def test_what_is_recorded_agrees_with_itself() -> None:
    assert main(["run", "salf-digits", "--set", "rounds=20", "--out", "one", "--quiet"]) == 0
    data = hpcfl.open_run("one")
    layers, depth = data.sizes["layer"], data["depth"].values
    reached = depth[:, :, None] <= np.arange(1, layers + 1)
    np.testing.assert_array_equal(data["layer_weight"], reached.sum(1))
    np.testing.assert_array_equal(data["blocks"], reached.sum(2))
    np.testing.assert_array_equal(data["arrived"], depth <= layers)
    np.testing.assert_array_equal(data["visits"].sum("rank"), (depth <= layers).sum(1))
    sizes = np.array([(64 + 1) * 32, (32 + 1) * 16, (16 + 1) * 10]) * 4
    np.testing.assert_array_equal(data["message_bytes"], (reached.sum(1) * sizes).sum(1))
    np.testing.assert_allclose(data["sim_seconds"], np.cumsum(data["round_seconds"]))


def test_check_says_what_would_happen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "salf-digits"]) == 0
    out = capsys.readouterr().out
    assert "0.0907, 0.0273, 0.000747" in out  # exp(-0.3 · 8 / share) for shares 1, 2/3, 1/3
    assert f"{4 * (65 * 32 + 33 * 16 + 17 * 10)} bytes per whole visit" in out
    assert not list(tmp_path.iterdir())


def test_list_names_presets_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "presets": ("salf-digits: SALF on the bundled digits, ", "table2-mlp-drop"),
        "overlays": ("  wait: FedAvg that waits for everybody",),
        "keys": ("  fedavg: ", "persist_optimizer = false (true or false)"),
    }
    for name, words in said.items():
        assert main(["list", name]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_users_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    with h5py.File("mine.h5", "w") as file:
        for client in range(4):
            for part, count in (("train", 30 + client), ("test", 9)):
                labels = rng.integers(3, size=count)
                file[f"clients/{client}/{part}/labels"] = labels
                file[f"clients/{client}/{part}/features"] = np.eye(3)[labels] + rng.normal(0, 0.1, (count, 3))
    Path("mine.toml").write_text(
        'rounds = 30\nclients = 4\n[algorithm]\nname = "fedavg"\n'
        '[data]\nname = "hdf5"\nfile = "mine.h5"\n[model]\nname = "mlp"\nhidden = []\n'
    )
    assert main(["run", "mine.toml", "--quiet"]) == 0
    (row,) = shown(capsys, "runs/mine")
    assert row["accuracy"] is None  # no global test set
    assert row["client_accuracy"] == 1.0


def test_golden_curve(capsys: pytest.CaptureFixture[str]) -> None:
    """The preset's curve, loosely: processors differ in the last bits, and training amplifies them."""
    assert main(["run", "salf-digits", "--out", "one", "--quiet"]) == 0
    golden = json.loads(GOLDEN.read_text())
    curve = hpcfl.open_run("one")["test_loss"].dropna("round")
    for round_, loss in golden["test_loss"].items():
        assert float(curve.sel(round=int(round_))) == pytest.approx(loss, rel=0.02)


@pytest.mark.launch
def test_runs_where_there_is_no_mpi(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"  # any import of it fails
        "from hpcfl.commands.cli import main\n"
        "sys.exit(main(['run', 'salf-digits', '--set', 'rounds=2', '--out', 'one']))"
    )
    ended = alone([sys.executable, "-c", code], env={"MPI4PY_LIBMPI": "/nonexistent", "PWD": str(tmp_path)})
    assert (ended.code, ended.err) == (0, "")
    assert "round 2/2" in ended.out


LOADED = """
import sys
from hpcfl.commands.cli import main
for preset in sys.argv[1:]:
    assert main(["check", preset]) == 0
needless = "h5netcdf", "matplotlib", "mpi4py", "pandas", "scipy", "sklearn", "sympy", "torch._dynamo", "xarray"
print("checks loaded", [name for name in needless if name in sys.modules])
for preset in sys.argv[1:]:
    assert main(["run", preset, "--set", "rounds=1", "--quiet", "--out", preset]) == 0
print("rounds loaded", [name for name in needless if name in sys.modules])
"""
PRESETS = "salf-ridge", "salf-digits", "srpfl-fedrep-digits", "srpfl-linear", "flic-digits"


@pytest.mark.launch
def test_checks_and_first_rounds_load_no_libraries_that_they_do_not_need(tmp_path: Path) -> None:
    ended = alone([sys.executable, "-c", LOADED, *PRESETS], env={"PWD": str(tmp_path)})
    assert (ended.code, ended.err) == (0, "")
    said = [line for line in ended.out.splitlines() if " loaded " in line]
    assert said == ["checks loaded []", "rounds loaded []"]


@pytest.mark.launch
@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.parametrize("what", ["h5py", "numpy", "mpi4py"])
def test_where_a_rank_lacks_a_package_the_job_ends(what: str, mpi: str, tmp_path: Path) -> None:
    """MPICH's launcher would wait for ever for a rank that has left before MPI started."""
    words = ["run", "fedavg-digits", "--out", str(tmp_path / "run")]
    ended = job(mpi, 2, [str(ROOT / "tests" / "helpers" / "lacking.py"), "0", what, *words])
    assert ended.code == 2, ended.err
    (line,) = ended.said
    assert f"No module named '{what}'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.launch
def test_an_mpi_launcher_without_mpi_is_told(tmp_path: Path) -> None:
    env = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI4PY_LIBMPI": "/nonexistent"}
    ended = alone([sys.executable, "-m", "hpcfl", "run", "salf-digits", "--out", str(tmp_path / "one")], env=env)
    assert ended.code == 2
    assert ended.err.startswith("hpcfl: started by an MPI launcher, but MPI cannot be loaded")
    assert len(ended.err.splitlines()) == 1

"""Runs on a GPU beside the same on the CPU: results, determinism, real time, load, ranks per device, large models.

    python benchmarks/gpu.py [--seconds 570] [--only PART ...] [--mpi openmpi]

Each part is a process of its own with a limit of its own, so that one that fails or hangs loses nothing of the others;
what each has found is printed as it ends, and the last line has all of it as JSON. The limits add up to 10 minutes,
for one GPU with 16 cores. Without a GPU everything is run on the CPU, which says nothing but that the parts work. Parts
on several ranks need an MPI below .mpi (or HPCFL_MPI), and are left out where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import launching
import numpy as np
import torch

import hpcfl
from hpcfl import store
from hpcfl.algorithms import algorithms
from hpcfl.comm.devices import described
from hpcfl.comm.processors import cores
from hpcfl.commands.show import summary
from hpcfl.testing.runs import table, toml

PRESETS = (
    *("salf-digits", "fedavg-digits", "drop-digits", "salf-ridge", "fedprox-digits", "resnet-digits"),
    *("srpfl-fedrep-digits", "srpfl-lg-digits", "srpfl-linear", "fedrep-linear"),
    *("flic-digits", "flic-toy", "flic-linear", "flic-barycenter"),
    *("fedlrgd-breast-cancer", "fedlrgd-softmax-digits", "fedave-logistic"),
    *("next-token", "multi-label", "survival"),
)
ROUNDS = 10  # of each preset
AT_ONCE = max(1, min(6, len(cores()) // 2))
DETERMINED = ("salf-digits", "fedavg-digits", "srpfl-fedrep-digits", "resnet-digits")
GPU = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = ("device", GPU), ("cpu", "cpu")  # of the folder, of the key
Found = dict[str, Any]


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hpcfl-gpu-") as place:
        yield Path(place)


def played(config: Any, out: Path, device: str, **more: Any) -> Found:
    """Run a config in this process; return figures and the shared state."""
    settings = {"device": device, **{key.replace("__", "."): value for key, value in more.items()}}
    run = hpcfl.run(config, out=out, settings=settings, quiet=True)
    return told(run.folder)


def told(run: Path) -> Found:
    """Return a run's figures: seconds per round after the first, what it came to, its shared state."""
    data, facts = store.open_run(run), summary(run)
    clock = data["wall_seconds"].values
    newest = store.latest(run)
    shared = store.load(newest, personal=False).shared if newest else {}
    loss = data["loss"].dropna("round").values
    return {
        "seconds": float((clock[-1] - clock[0]) / max(1, len(clock) - 1)),
        "accuracy": facts["accuracy"] if facts["accuracy"] is not None else facts["client_accuracy"],
        "loss": float(loss[-1]) if len(loss) else None,
        "digest": facts["state_sha256"],
        "shared": {name: np.asarray(value) for name, value in shared.items()},
    }


def apart(one: Found, other: Found) -> float:
    """Return the largest difference between two shared states, over the largest number."""
    pairs = [(one["shared"][name].astype(float), other["shared"][name].astype(float)) for name in one["shared"]]
    most = max((float(np.abs(left).max(initial=0)) for left, _ in pairs), default=0.0)
    return max((float(np.abs(left - right).max(initial=0)) for left, right in pairs), default=0.0) / (most or 1.0)


def beside(config: Any, **more: Any) -> Found:
    """Run a config on the device and on the CPU; return both results and the ratio of their seconds per round."""
    with folder() as place:
        there, here = (played(config, place / out, device, **more) for out, device in BOTH)
    kept = ("accuracy", "loss", "seconds")
    return {
        **{key: {"device": there[key], "cpu": here[key]} for key in kept},
        "ratio": round(there["seconds"] / here["seconds"], 3) if here["seconds"] else None,
        "apart": apart(there, here),
    }


# the parts


def preset(name: str) -> Found:
    return beside(name, rounds=ROUNDS, evaluate__every=ROUNDS)


def presets() -> Found:
    """Return what each quick preset comes to in its first rounds, some at a time: their seconds are rough."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(PRESETS, pool.map(lambda name: outcome(f"preset:{name}", 150), PRESETS)))


def methods() -> Found:
    """Return, of every method, whether two runs on the device end alike, and how far from the CPU's."""
    from hpcfl.testing.test_algorithms import values  # the one part that needs pytest

    found = {}
    for name in sorted(algorithms()):
        with folder() as place:
            runs = ("one", GPU), ("two", GPU), ("cpu", "cpu")
            one, two, cpu = (played(values(name), place / out, device) for out, device in runs)
        found[name] = {"same": one["digest"] == two["digest"], "apart": apart(one, cpu)}
        print(f"  {name}: {found[name]}", flush=True)
    return found


def determinism(mpi: str) -> Found:
    """Return whether a preset has one digest in two runs on the device, and on 3 ranks."""
    found: Found = {}
    for name in DETERMINED:
        with folder() as place:
            digests = [played(name, place / f"{run}", GPU, rounds=ROUNDS)["digest"] for run in range(2)]
            several = ranked(mpi, 3, name, place / "ranks", rounds=ROUNDS, server_device=GPU) if mpi else None
        alike = several["digest"] == digests[0] if several else "not run: no MPI"
        found[name] = {"two runs": digests[0] == digests[1], "3 ranks": alike}
        print(f"  {name}: {found[name]}", flush=True)
    return found


def wall(mpi: str) -> Found:
    """Return how far real-time rounds that all clients finish end from the CPU's, method by method."""
    if not mpi:
        return {"skipped": "no MPI"}
    found: Found = {}
    for method in ("salf", "fedavg"):
        with folder() as place:
            given = table(method, "cnn", False, clock="wall", speed={"model": "none"}, algorithm={"name": method})
            given |= {"participation": {"close": "all"}, "rounds": 5}
            one, other = (ranked(mpi, 3, given, place / out, device) for out, device in BOTH)
        found[method] = {"apart": apart(one, other), "seconds": {"device": one["seconds"], "cpu": other["seconds"]}}
        print(f"  {method}: {found[method]}", flush=True)
    return found


def mlp(hidden: list[int], clients: int = 2, **more: Any) -> Found:
    """Return a config of local steps on a perceptron."""
    return {
        **{"rounds": 4, "clients": clients, "seed": 1, "data": {"name": "digits"}, "speed": {"model": "none"}},
        "algorithm": {"name": "fedavg", "epochs": 0, "steps": 5, "batch": 64},
        **{"model": {"name": "mlp", "hidden": hidden}, "evaluate": {"every": 100, "last": 1}, **more},
    }


def busy() -> Found:
    """Return which share of the time the GPU computes, by model and clients per chunk, as nvidia-smi samples it."""
    found: Found = {}
    for hidden, clients, chunk in (([64], 32, 32), ([512, 512], 32, 8), ([2048, 2048], 16, 8), ([4096, 4096], 8, 4)):
        given = mlp(hidden, clients, rounds=40, batch_clients=chunk)
        given["algorithm"]["steps"] = 20
        with folder() as place, sampled() as samples:
            seconds = played(given, place / "run", GPU)["seconds"]
        share = round(float(np.mean(samples[len(samples) // 4 :])), 1) if samples else None
        found[f"{hidden}, {clients} clients in chunks of {chunk}"] = {"percent": share, "seconds per round": seconds}
        print(f"  {hidden}: {share} %, {seconds:.4f} s per round", flush=True)
    return found


@contextmanager
def sampled() -> Iterator[list[float]]:
    """Sample the GPU's utilisation within the block."""
    samples: list[float] = []
    if GPU == "cpu":
        yield samples
        return
    words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    watch = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        for line in watch.stdout or ():
            if line.strip().isdecimal():
                samples.append(float(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        watch.terminate()
        watch.wait()
        reader.join(1)


def sharing(mpi: str) -> Found:
    """Return the seconds of a round of 32 clients by how many client ranks share the device."""
    if not mpi:
        return {"skipped": "no MPI"}
    found: Found = {}
    for ranks in (1, 2, 4, 8):
        with folder() as place:
            given = mlp([512, 512], 32, rounds=12, batch_clients=4)
            found[str(ranks)] = ranked(mpi, 1 + ranks, given, place / "run")["seconds"]
        print(f"  {ranks} client ranks: {found[str(ranks)]:.4f} s per round", flush=True)
    return found


def model(size: str, mpi: str) -> Found:
    """Return the seconds of a round with a large model, in one process and, for the smaller one, in real time."""
    hidden = {"100MB": [5000, 5000], "1GB": [15800, 15800]}[size]
    given = mlp(hidden, batch_clients=False)
    found: Found = {}
    with folder() as place:
        if GPU == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found["seconds"] = played(given, place / "one", GPU)["seconds"]
        found["MB on the device"] = round(torch.cuda.max_memory_allocated() / 1e6) if GPU == "cuda" else None
        if size == "100MB":
            found["cpu seconds"] = played(given, place / "cpu", "cpu")["seconds"]
            print(f"  {found}", flush=True)
            del given["batch_clients"]
            real = {**given, "clock": "wall"}
            found["real time on 3 ranks"] = ranked(mpi, 3, real, place / "real")["seconds"] if mpi else None
    return found


def ranked(mpi: str, ranks: int, config: Any, out: Path, device: str = GPU, **more: Any) -> Found:
    """Run a preset, or a config, on ranks that share the device."""
    what = config if isinstance(config, str) else str(toml(config, out.with_suffix(".toml")))
    settings = {"device": device, "ranks_per_device": ranks, **more}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    mark = f"gpu-{os.getpid()}-{time.monotonic_ns()}"
    args = ["-m", "hpcfl", "run", what, *words, "--out", str(out), "--quiet"]
    try:
        child = subprocess.run(
            launching.command(mpi, ranks, args),
            env=launching.environment(mpi, mark),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        launching.left_behind(mark)
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}: {child.stderr[-500:]}")
    return told(out)


PARTS: dict[str, tuple[float, Callable[[str], Found]]] = {  # seconds that each may take
    "methods": (80, lambda mpi: methods()),
    "determinism": (90, determinism),
    "wall": (50, wall),
    "presets": (120, lambda mpi: presets()),
    "busy": (60, lambda mpi: busy()),
    "sharing": (60, sharing),
    "100MB": (50, lambda mpi: model("100MB", mpi)),
    "1GB": (60, lambda mpi: model("1GB", mpi)),
}


def part(name: str, mpi: str) -> Found:
    if name.startswith("preset:"):
        return preset(name.partition(":")[2])
    return PARTS[name][1](mpi)


def outcome(name: str, limit: float, mpi: str = "") -> Found:
    """Return what a part finds in a process of its own; what went wrong, where it does not end well."""
    words = [sys.executable, __file__, "--part", name, "--mpi", mpi]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return {"error": f"no end after {limit:.0f} s", "so far": out[-1500:]}
    *lines, last = out.splitlines() or [""]
    if child.returncode or not last.startswith("{"):
        return {"error": f"exit code {child.returncode}", "said": (out + err)[-1500:]}
    for line in lines:
        print(line, flush=True)
    found: Found = json.loads(last)
    return found


def main() -> None:
    """Run the parts; print each as it ends, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=570.0, help="All of it; what is left then is not begun.")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mpi", default=next(iter(launching.mpis()), ""))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(part(options.part, options.mpi)))
        return
    start = time.monotonic()
    device = described("cuda:0") if GPU == "cuda" else "none: all was run on the CPU"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    whole: Found = {"gpu": device, "date": time.strftime("%Y-%m-%d"), **versions, "mpi": options.mpi, "parts": {}}
    print(f"GPU: {device}", flush=True)
    for name in options.only:
        left = options.seconds - (time.monotonic() - start)
        began = time.monotonic()
        found = outcome(name, min(PARTS[name][0], left), options.mpi) if left > 10 else {"error": "no time left"}
        whole["parts"][name] = found
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(found)}", flush=True)
    whole["seconds"] = round(time.monotonic() - start)
    print(json.dumps(whole))


if __name__ == "__main__":
    main()

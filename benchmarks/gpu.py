"""Runs on a GPU beside the same by hand and on the CPU: speed, results, determinism, real time, ranks per device.

    python benchmarks/gpu.py [--seconds 480] [--only PART ...] [--works WORK ...] [--mpi openmpi] [--dry-run]

Each part is a process of its own with a limit of its own, so that one that fails or hangs loses nothing of the others;
what each has found is printed as it ends, and the last line has all of it as JSON. 8 minutes on one GPU with 16 cores,
the parts that tell most first. Without a GPU everything is run on the CPU, which says nothing but that the parts work;
with `--dry-run` small works are run on a device that is none (`hpcfl.testing.fake_device`), in one process, which ends
with the traceback of the first error. Parts on several
ranks need an MPI below .mpi (or HPCFL_MPI), and are left out where there is none.

- ``anchors``: rounds of five works beside the same by hand (`gpu_by_hand`), and without ``deterministic``;
- ``profile``: launches, seconds that the card is busy and places where the host waits, in one round of each work;
- ``neighbours``: by how much what a client computes depends on how many others are computed beside it.
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_by_hand
import launching
import numpy as np
import torch

import hpcfl
from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import algorithms
from hpcfl.commands.show import summary
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import step
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.launch import host as launched
from hpcfl.launch.host import fixed_arithmetic
from hpcfl.learning.fused import formed
from hpcfl.learning.optim import Adam, Sgd
from hpcfl.mpi.cores import cores
from hpcfl.mpi.devices import described
from hpcfl.mpi.transport import Transport
from hpcfl.testing import fake_device
from hpcfl.testing.runs import table, toml

PRESETS: tuple[str, ...] = (
    *("salf-digits", "fedavg-digits", "wait-digits", "drop-digits", "salf-ridge", "fedprox-digits", "resnet-digits"),
    *("srpfl-fedrep-digits", "srpfl-lg-digits", "srpfl-linear", "fedrep-linear"),
    *("flic-digits", "flic-toy", "flic-linear", "flic-barycenter"),
    *("fedlrgd-breast-cancer", "fedlrgd-softmax-digits", "fedave-logistic"),
    *("next-token", "next-token without dropout", "multi-label", "survival"),
)
ROUNDS = 10  # of each preset
AT_ONCE = max(1, min(6, len(cores()) // 2))
DETERMINED: tuple[str, ...] = ("salf-digits", "fedavg-digits", "srpfl-fedrep-digits", "resnet-digits")
DRY = "--dry-run" in sys.argv
if DRY:
    PRESETS, DETERMINED, ROUNDS, AT_ONCE = ("next-token without dropout",), ("salf-digits",), 2, 1
GPU = "auto" if DRY else "cuda" if torch.cuda.is_available() else "cpu"
PLACE = "fake:0" if DRY else "cuda:0" if GPU == "cuda" else "cpu"
BOTH = ("device", GPU), ("cpu", "cpu")  # of the folder, of the key
WORKS: list[str] = []  # those that are wanted; none: all
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


def wanted() -> dict[str, gpu_by_hand.Work]:
    return {name: work for name, work in gpu_by_hand.works(DRY).items() if not WORKS or name in WORKS}


# the parts


def anchors() -> Found:
    """Return seconds per round of each work by hand and by hpcfl, and what hpcfl takes of the best by hand."""
    found: Found = {}
    for name, work in wanted().items():
        hand: Found = {}
        for way in work.ways:
            with fixed_arithmetic(True):
                median, _, loss = gpu_by_hand.ByHand(name, way, PLACE, DRY).seconds(2 if DRY else 5)
            hand[way] = {"seconds": median, "loss": loss}
        ways: Found = {"auto": {}, "at once": {"batch_clients": work.clients}, "free": {"deterministic": False}}
        ours = {way: by_hpcfl(name, work, more) for way, more in ways.items()}
        best = min(each["seconds"] for each in hand.values())
        ratios = {way: round(each["seconds"] / best, 2) for way, each in ours.items()}
        losses = [each["loss"] for each in (*hand.values(), *ours.values())]
        found[name] = {"by hand": hand, "hpcfl": ours, "ratio": ratios, "losses apart": max(losses) - min(losses)}
        print(f"  {name}: {json.dumps(found[name])}", flush=True)
    return found


def by_hpcfl(name: str, work: gpu_by_hand.Work, more: Found) -> Found:
    """Return the median seconds of a round from one server's step to the next, once steps are replayed, and the loss.

    The loss is that of the first round.
    """
    given = work.config(name, rounds=6 if DRY else 14, device=GPU, **more)
    given["data"] |= {"small": DRY}
    with folder() as place, gpu_by_hand.timed_steps() as steps:
        run = hpcfl.run(given, out=place / "run", quiet=True)
        loss = float(run.data["loss"].values[0])
    return {"seconds": float(np.median(np.diff(steps)[4:])), "loss": loss}


def profile() -> Found:
    """Return, of one round of each work, launches, busy time, waits of the host by place, and the dearest kernels."""
    found: Found = {}
    for name, work in wanted().items():
        given = work.config(name, rounds=9, batch_clients=work.clients)
        given["data"] |= {"small": DRY}
        with fixed_arithmetic(True):
            job = Job.of(configs.from_table(given), None, 1, PLACE)
            now, rounds = job.begin(0), Simulated(job, Transport(), 0)

            def one(job: Job = job, now: Progress = now, rounds: Simulated = rounds) -> None:
                record = Record.open()
                plan, record.sums = rounds.exchange(now, record)
                step(job, now, record, plan)
                now.round += 1

            one()
            one()
            waits = waited(one)
            start = time.perf_counter()
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if PLACE.startswith("cuda"):
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=kinds) as watched:
                one()
            seconds = time.perf_counter() - start
        events = [
            each for each in watched.key_averages() if each.self_device_time_total and not each.self_cpu_time_total
        ]
        dear = sorted(events, key=lambda each: -each.self_device_time_total)[:4]
        found[name] = {
            "computing": job.task.computing,
            "chunk": job.chunk,
            "launches": sum(each.count for each in events),
            "busy ms": round(sum(each.self_device_time_total for each in events) / 1e3, 1),
            "profiled ms": round(1e3 * seconds, 1),
            "waits": waits,
            "dearest": [[each.key[:50], each.count, round(each.self_device_time_total / 1e3, 2)] for each in dear],
        }
        print(f"  {name}: {json.dumps(found[name])}", flush=True)
    return found


def waited(work: Callable[[], None]) -> dict[str, int]:
    """Return how often the host waits for the device in some work, by file and line."""
    if not PLACE.startswith("cuda"):
        with fake_device.counted() as waits:
            work()
        return dict(waits)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    places = (f"{Path(each.filename).name}:{each.lineno}" for each in said if "synchroniz" in str(each.message))
    return dict(Counter(places))


def neighbours() -> Found:
    """Return the largest difference that the number of clients beside it makes to a client's parameters, by work."""
    found: Found = {}
    for name, work in wanted().items():
        hand = gpu_by_hand.ByHand(name, "written" if "written" in work.ways else "vmap", PLACE, DRY)
        orders, counts = hand.keyed_orders(), sorted({1, 2, work.clients // 3, work.clients // 2} - {0})
        with fixed_arithmetic(True):
            every, again = hand.visit_of(work.clients, orders), hand.visit_of(work.clients, orders)
            found[name] = {"again": largest(every, again)}
            for count in counts:
                found[name][f"{count} of {work.clients}"] = largest(every, hand.visit_of(count, orders))
        print(f"  {name}: {found[name]}", flush=True)
    return found


def largest(one: gpu_by_hand.State, other: gpu_by_hand.State) -> float:
    """Return the largest difference between the first clients' parameters."""
    return max(float((one[name][: len(value)] - value).abs().max()) for name, value in other.items())


def preset(name: str) -> Found:
    """Return a preset's first rounds on both, and how far 1e-7 in the gradients leads on a CPU."""
    more: Found = {"rounds": ROUNDS, "evaluate__every": ROUNDS}
    if name.endswith(" without dropout"):
        name, more = name.removesuffix(" without dropout"), more | {"model__dropout": 0.0}
    found = beside(name, **more)
    with folder() as place:
        plain = played(name, place / "plain", "cpu", **more)
        with disturbed():
            found["1e-7 in gradients"] = apart(played(name, place / "other", "cpu", **more), plain)
    return found


@contextmanager
def disturbed() -> Iterator[None]:
    """Multiply each gradient that an optimiser is given by 1 + 1e-7·N(0, 1) within the block."""
    generator, before = torch.Generator().manual_seed(0), {kind: kind.apply for kind in (Sgd, Adam)}

    def disturb(kind: Any) -> Any:
        def apply(self: Any, params: Any, gradients: Any, memory: Any, active: Any = None) -> None:
            noisy = {
                name: value * (1 + 1e-7 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
                for name, value in formed(gradients).items()
            }
            before[kind](self, params, noisy, memory, active)

        return apply

    for kind in before:
        kind.apply = disturb(kind)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, own in before.items():
            kind.apply = own  # type: ignore[method-assign]


def presets() -> Found:
    """Return what each quick preset comes to in its first rounds, some at a time: their seconds are rough."""

    def one(name: str) -> Found:
        found = outcome(f"preset:{name}", 150)
        print(f"  {name}: {json.dumps(found)}", flush=True)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(PRESETS, pool.map(one, PRESETS)))


def methods() -> Found:
    """Return, of every method, whether two runs on the device end alike, and how far from the CPU's."""
    from hpcfl.testing.test_algorithms import values  # the one part that needs pytest

    found = {}
    for name in ("fedavg", "salf") if DRY else sorted(algorithms()):
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
    large = ([512, 512], 32, 8), ([2048, 2048], 16, 8), ([4096, 4096], 8, 4)
    for hidden, clients, chunk in (([64], 32, 32), *(() if DRY else large)):
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
    if DRY or GPU == "cpu":
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
    hidden = [50] if DRY else {"100MB": [5000, 5000], "1GB": [15800, 15800]}[size]
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
    "anchors": (200, lambda mpi: anchors()),
    "profile": (90, lambda mpi: profile()),
    "neighbours": (30, lambda mpi: neighbours()),
    "methods": (80, lambda mpi: methods()),
    "determinism": (90, determinism),
    "wall": (50, wall),
    "presets": (240, lambda mpi: presets()),
    "busy": (60, lambda mpi: busy()),
    "sharing": (90, sharing),
    "100MB": (50, lambda mpi: model("100MB", mpi)),
    "1GB": (60, lambda mpi: model("1GB", mpi)),
}


def part(name: str, mpi: str) -> Found:
    if name.startswith("preset:"):
        return preset(name.partition(":")[2])
    return PARTS[name][1](mpi)


def outcome(name: str, limit: float, mpi: str = "") -> Found:
    """Return what a part finds in a process of its own; what went wrong, where it does not end well."""
    if DRY:
        return part(name, mpi)
    words = [sys.executable, __file__, "--part", name, "--mpi", mpi]
    words += ["--works", *WORKS] if WORKS else []
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        print(out, end="", flush=True)
        return {"error": f"no end after {limit:.0f} s"}
    *lines, last = out.splitlines() or [""]
    if child.returncode or not last.startswith("{"):
        print(out, end="", flush=True)
        return {"error": f"exit code {child.returncode}", "said": (out + err)[-1500:]}
    for line in lines:
        print(line, flush=True)
    found: Found = json.loads(last)
    return found


def main() -> None:
    """Run the parts; print each as it ends, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="All of it; what is left then is not begun.")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--works", nargs="*", choices=gpu_by_hand.works(DRY), default=WORKS, help="Of the first three.")
    parser.add_argument("--mpi", default="" if DRY else next(iter(launching.mpis()), ""))
    parser.add_argument("--dry-run", action="store_true", help="Small works on a device that is none.")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    WORKS[:] = options.works
    if DRY:
        fake_device.registered()
        torch.__future__.set_swap_module_params_on_conversion(True)  # as on a GPU, tied parameters stay tied
        launched.chosen = lambda wanted, *_: "cpu" if wanted == "cpu" else PLACE  # type: ignore[attr-defined]
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

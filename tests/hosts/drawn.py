"""Jobs on four hosts that something befalls, drawn by a seed: ``PYTHONPATH=tests python -m hosts.drawn --seeds 0:100``.

An MPI, a clock, a layout, a fault, its host, the round in which it comes and how long it lasts. Each run has to end as
docs/howto/hosts.md says, within the time given there, with nobody left on any host; what is not done is resumed, on
the hosts that are left where one is lost. Then its folder is whole, its rounds are all there, the fates of all visits
add up (`store.open_run` says so), and in simulated time it has the bits of an undisturbed run.

Appends a JSON line per seed to ``--record``, and leaves out seeds that have one; ``broken`` is "" where nothing was.
Prints one JSON line last. Exit code 1: something was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from helpers.launcher import alone, mpis
from hosts.cluster import Cluster, missing
from hosts.test_hosts import HASTY, LEFT_SECONDS, REAL, SIMULATED, SPREAD, came, run, told
from hpcfl import store
from hpcfl.base.rng import keyed
from hpcfl.commands.show import summary
from hpcfl.testing.runs import toml

ROUNDS = 40
PASSING = {"cut": "join", "freeze": "thaw", "rate": ""}  # and how they pass
KEPT = {"name": "fedavg", "epochs": 1, "momentum": 0.5, "persist_optimizer": True}


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for; a fault that is `gone` does not pass."""

    seed: int
    mpi: str
    real: bool
    width: Any
    ulfm: bool
    fault: str
    gone: bool
    host: str
    round: int
    seconds: float

    @property
    def kills(self) -> bool:
        return self.fault in ("kill", "crash")

    @property
    def waits(self) -> bool:
        """Whether the others wait for ever, and whose run it is ends it: nobody notices that a host is gone."""
        return not self.real and self.fault == "crash" and self.host != "h1"

    @property
    def config(self) -> dict[str, Any]:
        more: dict[str, Any] = {"rounds": ROUNDS, "checkpoint": {"every": 1}, "algorithm": KEPT}
        if self.real:
            more |= {"lane_width": self.width} | ({"lost_after": 3.0} if self.gone else {})
        return (REAL if self.real else SIMULATED) | more


def drawn(seed: int) -> Drawn:
    rng = keyed(seed, "hosts")

    def one(of: Any) -> Any:
        return of[int(rng.integers(len(of)))]

    mpi, real, width = one(mpis()), bool(rng.random() < 0.6), one([1, "two-level"])
    fault, host = one(["cut", "freeze", "rate", "kill", "crash"]), f"h{int(rng.integers(1, 5))}"
    gone = fault in ("kill", "crash") or (real and fault == "cut" and host != "h1" and rng.random() < 0.3)
    ulfm = real and mpi == "openmpi" and bool(rng.random() < 0.3)
    return Drawn(seed, mpi, real, width, ulfm, fault, gone, host, int(rng.integers(1, 25)), float(rng.uniform(0.2, 6)))


def befall(cluster: Cluster, what: Drawn) -> None:
    """Let it happen, and pass if it does."""
    if what.fault == "rate":
        cluster.rate(what.host, 2.0)
    else:
        getattr(cluster, what.fault)(what.host)
    if not what.gone:
        time.sleep(what.seconds)
        cluster.rate(what.host, 0) if what.fault == "rate" else getattr(cluster, PASSING[what.fault])(what.host)


def play(what: Drawn, here: Path) -> dict[str, Any]:
    """Play what is drawn; return how it ended, or raise AssertionError."""
    folder, options = here / "run", ("--with-ft", "ulfm") if what.ulfm else ()
    _, _, *words = run(folder, toml(what.config, here / "run.toml"))
    with Cluster(4, [here]) as cluster:
        with cluster.live(what.mpi, SPREAD, [*HASTY, *words], here / "first", options) as job:
            job.until(lambda: told(job) > what.round)
            befall(cluster, what)
            struck = time.monotonic()
            if what.waits:
                for host in cluster.names:
                    cluster.kill(host)
            cluster.until(lambda: job.process.poll() is not None or store.read_status(folder).state != "running", 300)
            if what.fault == "crash":  # ranks that nobody tells of it notice that they hear nothing
                cluster.until(lambda: not any("hasty.py" in each for each in cluster.left()), 2 * LEFT_SECONDS)
            cluster.until(lambda: not cluster.left(), LEFT_SECONDS)
            code, lasted = job.process.wait(), time.monotonic() - struck
        state = store.read_status(folder).state
        assert what.gone or (code, state) == (0, "done"), f"{code} {state}: {job.err}"
        assert state == "done" or code != 0 or what.mpi == "openmpi", f"exit code 0 of a run that is {state}"
        if state != "done":
            assert what.kills, f"{state}: {job.err}"
            left = [0 if name == what.host else count for name, count in zip(cluster.names, SPREAD)]
            with cluster.live(what.mpi, left, ["-m", "hpcfl", "resume", folder, "--force"], here / "second") as again:
                assert again.wait() == 0, again.out + again.err
                cluster.until(lambda: not cluster.left(), LEFT_SECONDS)
    check(what, folder, resumed=state != "done")
    return {"code": code, "state": state, "resumed": state != "done", "lasted": round(lasted, 1)}


def check(what: Drawn, folder: Path, resumed: bool) -> None:
    """Raise AssertionError where what has been recorded is not what it should be."""
    verified = alone([sys.executable, "-m", "hpcfl", "verify", str(folder)])
    assert verified.code == 0, verified.out + verified.err
    with store.open_run(folder) as data:
        assert data.attrs["status"] == "done"
        assert data["round"].values.tolist() == list(range(ROUNDS))
    if not what.real:
        assert summary(folder)["state_sha256"] == undisturbed(), "other bits than those of an undisturbed run"
    elif not resumed and what.host != "h1":
        clients = {"h2": [0, 1], "h3": [2, 3], "h4": [4, 5]}[what.host]
        assert came(folder, [client for client in range(6) if client not in clients]).all(), "visits of others are lost"


@cache
def undisturbed() -> str:
    """Return the digest of such a run in simulated time, by one process."""
    with tempfile.TemporaryDirectory() as name:
        config = Drawn(0, "", False, 1, False, "", False, "", 0, 0.0).config
        words = run(Path(name) / "run", toml(config, Path(name) / "run.toml"))
        ended = alone([sys.executable, *map(str, words)])
        assert ended.code == 0, ended.err
        return str(summary(Path(name) / "run")["state_sha256"])


def main() -> int:
    """Play seeds, and record how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:10", help="from the first up to before the last")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6000.0, help="begin no more after so many")
    asked = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    lines = asked.record.read_text(encoding="utf-8").splitlines() if asked.record.exists() else []
    rows, began = {row["seed"]: row for row in map(json.loads, lines)}, time.monotonic()
    seeds = range(*map(int, asked.seeds.split(":")))
    for seed in (each for each in seeds if each not in rows):
        if time.monotonic() - began > asked.seconds:
            break
        what, start = drawn(seed), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="drawn-") as name:
            try:
                found = play(what, Path(name)) | {"broken": ""}
            except AssertionError as error:
                found = {"broken": str(error)[-2000:]}
        rows[seed] = asdict(what) | found | {"took": round(time.monotonic() - start, 1)}
        with asked.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[seed]) + "\n")
        print(rows[seed], file=sys.stderr, flush=True)
    played = [rows[seed] for seed in seeds if seed in rows]
    broken = [row["seed"] for row in played if row["broken"]]
    print(json.dumps({"played": len(played), "faults": Counter(row["fault"] for row in played), "broken": broken}))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

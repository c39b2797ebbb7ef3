"""The runs by which docs/studies/papers.md says what came of each result of the four papers: one JSON line each.

    python analysis/papers.py run [salf ...] [--shard 0/2] [--minutes 100] [--only figures table2/90 ...]
    python analysis/papers.py cost [salf ...]
    python analysis/papers.py again [salf ...] [--minutes 10] [--draw WORD]

What is run is in jobs/papers/PAPER.toml: studies of cases, arms and seeds. As soon as a run is over, whatever its
end, a line is appended to jobs/papers/PAPER.jsonl; what is there is skipped. It has what was measured at each test,
or, of an arm with a `command`, the JSON line that this prints. `cost` says how many runs there are and what those
took that are done. `again` carries out some of them anew, and holds them against their lines; its exit code is 1
where they differ. Each prints one JSON line last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import study_lines
from study_lines import ROOT, Line

if TYPE_CHECKING:
    import xarray
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = ROOT / "jobs" / "papers"
PAPERS = "srpfl", "salf", "flic", "fedlrgd"
MEASURED = "accuracy", "mean_client_accuracy", "objective", "distance"
"""Columns of run.h5 of which a line has each test, where they are."""
RESULTS = "status", "values", "rounds", "sim_seconds", *MEASURED


class Run(NamedTuple):
    """One run of a study; `seed` is 0 where the study has no seeds."""

    paper: str
    study: str
    case: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.study}/{self.case}/{self.arm}/{self.seed}"

    @property
    def about(self) -> dict[str, Any]:
        """Return what the study's table says."""
        return studies(self.paper)[self.study]


@cache
def studies(paper: str) -> dict[str, dict[str, Any]]:
    """Return what a paper's file holds."""
    return tomllib.loads((FOLDER / f"{paper}.toml").read_text(encoding="utf-8"))


def wanted(paper: str) -> Iterator[Run]:
    """Yield a paper's runs: of each study all of the first seed before the second."""
    for study, about in studies(paper).items():
        for seed in about.get("seeds", [0]):
            for case, keys in about.get("cases", {"all": {}}).items():
                for arm in about["arms"]:
                    if arm not in keys.get("without", []):
                        yield Run(paper, study, case, arm, seed)


def asked_of(run: Run) -> tuple[str, list[str], dict[str, Any]]:
    """Return a run's preset, overlays and settings: those of the study, the case, the arm, and of the arm's kind."""
    case, arm = run.about.get("cases", {}).get(run.case, {}), run.about["arms"][run.arm]
    parts = [run.about, arm, case, case.get(arm.get("kind", ""), {}), case.get(run.arm, {})]
    overlays = [name for part in parts for name in part.get("with", [])]
    settings = {key: value for part in parts for key, value in part.get("set", {}).items()}
    preset = [part["preset"] for part in parts if "preset" in part][-1]
    return preset, overlays, settings | {"seed": run.seed}


def carried_out(run: Run) -> Line:
    """Return the line of a run."""
    with TemporaryDirectory() as folder:
        line = printed(run, folder) if "command" in run.about["arms"][run.arm] else measured(run, Path(folder))
    return run._asdict() | line | study_lines.origin()


def printed(run: Run, folder: str) -> Line:
    """Return what the last line of a command's output says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = run.about.get("cases", {}).get(run.case, {}).get("options", "")
    command = f"{run.about['arms'][run.arm]['command']} {options}".format(seed=run.seed, out=folder)
    asked = [sys.executable, *shlex.split(command)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = {"seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)}
    if done.returncode:
        return {"status": "failed", "why": done.stderr.strip().splitlines()[-1], **seconds}
    return {"status": "done", "values": json.loads(done.stdout.strip().splitlines()[-1]), **seconds}


def measured(run: Run, folder: Path) -> Line:
    """Return how a run ended, and what was measured at its tests."""
    import hpcfl
    from hpcfl.base.errors import Diverged, Ended, UserError

    began, out, line = time.process_time(), folder / "run", Line()
    preset, overlays, settings = asked_of(run)
    try:
        hpcfl.run(preset, overlays=overlays, settings=settings, out=out, quiet=True)
    except Ended:
        pass
    except (UserError, Diverged) as error:
        line = {"status": type(error).__name__, "why": str(error).splitlines()[0].replace(str(folder), "")}
    if (out / "run.h5").is_file():
        data = hpcfl.open_run(out)
        digest = hashlib.sha256(data.attrs["config"].replace(str(folder), "").encode()).hexdigest()
        line = {"status": data.attrs["status"], **line, "config": digest[:12], **tests(data)}
        line |= {name: [rounded(each) for each in data[name][-1].values.ravel()] for name in run.about.get("last", [])}
    return line | {"seconds": round(time.process_time() - began, 2)}


def tests(data: xarray.Dataset) -> Line:
    """Return of each test how many rounds were over, the simulated seconds, and what was measured, to five digits."""
    names = [name for name in MEASURED if name in data]
    there = np.any([data[name].notnull() for name in names], axis=0)
    found = {name: [rounded(each) for each in data[name].values[there]] for name in [*names, "sim_seconds"]}
    known = {name: values for name, values in found.items() if any(value is not None for value in values)}
    return {"rounds": (np.flatnonzero(there) + 1).tolist(), **known}


def rounded(value: float) -> float | None:
    """Return a number to five digits; None for NaN."""
    return float(f"{value:.5g}") if value == value else None


# what is asked


def run(papers: Sequence[str], part: tuple[int, int], minutes: float, only: Sequence[str]) -> dict[str, Any]:
    """Carry out what is not there yet of a shard, for so many minutes."""
    began, runs, spent, (number, count) = time.monotonic(), 0, 0.0, part
    for paper in papers:
        there = {identity(line) for line in known(paper)}
        asked = [each for each in wanted(paper) if not only or any(each.name.startswith(name) for name in only)]
        for each in asked[number::count]:
            if each in there:
                continue
            if time.monotonic() - began > 60 * minutes:
                return {"shard": f"{number}/{count}", "runs": runs, "seconds": round(spent, 1)}
            line = carried_out(each)
            study_lines.append(FOLDER / f"{paper}.jsonl", line)
            runs, spent = runs + 1, spent + line["seconds"]
            print(f"{paper} {each.name}: {line['status']}, {line['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {"shard": f"{number}/{count}", "runs": runs, "seconds": round(spent, 1), "complete": True}


def known(paper: str) -> list[Line]:
    """Return what is there of a paper."""
    return study_lines.read(FOLDER / f"{paper}.jsonl")


def identity(line: Mapping[str, Any]) -> Run:
    """Return which run a line is of."""
    return Run(*(line[name] for name in Run._fields))


def cost(papers: Sequence[str]) -> dict[str, Any]:
    """Return how many runs each study has, how many are done, and the processor-hours of these."""
    found: dict[str, Any] = {}
    for paper in papers:
        done = {identity(line): line["seconds"] for line in known(paper)}
        for each in wanted(paper):
            study = found.setdefault(f"{paper} {each.study}", {"runs": 0, "done": 0, "hours": 0.0})
            study["runs"] += 1
            study["done"] += each in done
            study["hours"] += done.get(each, 0.0) / 3600
    return {name: {**study, "hours": round(study["hours"], 3)} for name, study in found.items()}


def again(papers: Sequence[str], minutes: float, draw: str) -> dict[str, Any]:
    """Carry out anew some lines that are drawn, which took so many minutes; return which differ."""
    lines = [line for paper in papers for line in known(paper) if line["status"] == "done"]
    lines.sort(key=lambda line: hashlib.sha256(f"{draw} {identity(line)}".encode()).digest())
    spent, runs, differ = 0.0, 0, list[str]()
    for line in lines:
        here = study_lines.origin()
        if spent + line["seconds"] > 60 * minutes or any(
            line[name] != here[name] for name in ("versions", "processor")
        ):
            continue
        new = carried_out(identity(line))
        spent, runs = spent + line["seconds"], runs + 1
        differ += [f"{identity(line).name}: {name}" for name in line if name in RESULTS and line[name] != new.get(name)]
    return {"runs": runs, "seconds": round(spent, 1), "differ": differ}


def main() -> None:
    """Run, or say what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "cost", "again"))
    parser.add_argument("papers", nargs="*", help=f"of {', '.join(PAPERS)}; else all")
    parser.add_argument("--shard", type=study_lines.shard, default=(0, 1), help="of how many, and which one")
    parser.add_argument("--minutes", type=float, default=100.0, help="begin no run after so many")
    parser.add_argument("--only", nargs="*", default=[], help="what begins so: study/case/arm/seed")
    parser.add_argument("--draw", default="", help="which lines are run again")
    asked = parser.parse_args()
    papers = asked.papers or PAPERS
    if unknown := [name for name in papers if name not in PAPERS]:
        parser.error(f"no paper {unknown[0]!r}; expected some of {', '.join(PAPERS)}")
    if asked.command == "cost":
        told = cost(papers)
    elif asked.command == "again":
        told = again(papers, asked.minutes, asked.draw)
    else:
        told = run(papers, asked.shard, asked.minutes, asked.only)
    print(json.dumps(told))
    sys.exit(1 if told.get("differ") else 0)


if __name__ == "__main__":
    main()

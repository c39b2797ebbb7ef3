"""What a site has for jobs: its scheduler, what starts MPI, GPUs, disks of nodes, modules; and a job script for it.

Of each thing that is lacking one line, with what to do. The scripts are those below ``jobs`` with other numbers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from hpcfl.base.errors import RunError, UsageError, refusal
from hpcfl.base.lazy import MPI
from hpcfl.mpi import launcher


class Scheduler(NamedTuple):
    """A scheduler: what tells its version, the variable that its jobs have, its script and the directives in it."""

    title: str
    asked: str
    said: str
    inside: str
    script: str
    directive: str


SCHEDULERS = {
    "slurm": Scheduler("Slurm", "sbatch --version", r"slurm\S* ([\d.]+)", "SLURM_JOB_ID", "run.sbatch", "#SBATCH --"),
    "pbs": Scheduler("PBS", "qstat --version", r"pbs_version = (\S+)", "PBS_JOBID", "run.pbs", "#PBS -l "),
    "flux": Scheduler("Flux", "flux version", r"libflux-core:\s*(\S+)", "FLUX_URI", "run.flux", "#flux: --"),
}
SCRATCH = ("SLURM_TMPDIR", "TMPDIR", "/scratch", "/local", "/localscratch", "/tmp")
IN_MEMORY = ("tmpfs", "ramfs")
OF_ONE_HOST = (*IN_MEMORY, "ext2/ext3", "xfs", "btrfs", "zfs", "overlayfs")
RANKS, LEAST = 5, 5  # ranks on a node; minutes of a job


@dataclass(frozen=True)
class Site:
    """What was found."""

    scheduler: str = ""  # of `SCHEDULERS`, or empty
    version: str = ""
    nodes: list[str] = field(default_factory=list)  # as the scheduler says, a text for each kind
    kinds: list[str] = field(default_factory=list)  # of srun --mpi
    mpi: str = ""  # that mpi4py loads
    starts: str = ""  # the words that start its ranks
    unstarted: str = ""  # why there are none
    gpus: list[str] = field(default_factory=list)  # of this host
    scratch: dict[str, tuple[str, int]] = field(default_factory=dict)  # folder: file system, free GB
    modules: bool = False
    here: str = ""  # this folder's file system
    silent: str = ""  # how a scheduler was asked that is there, but does not answer


def look() -> Site:
    """Look around on this host."""
    found = {name: re.search(each.said, ask(*each.asked.split())) for name, each in SCHEDULERS.items()}
    versions = {name: match[1] for name, match in found.items() if match}
    scheduler = min(versions, key=lambda name: SCHEDULERS[name].inside not in os.environ, default="")
    mpi = starts = unstarted = ""
    try:
        starts = shlex.join(launcher.starter())
    except UsageError as error:
        unstarted = str(error)
    with suppress(ImportError, RuntimeError):
        mpi = launcher.library(MPI.Get_library_version())
    folders = {Path(os.environ.get(place, place)) for place in SCRATCH}
    return Site(
        scheduler,
        versions.get(scheduler, ""),
        [*nodes(scheduler)],
        [*dict.fromkeys(re.findall(r"\b(?:cray|open|pmi)\w*", ask("srun", "--mpi=list")))],
        mpi,
        starts,
        unstarted,
        re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", ask("nvidia-smi", "-L"), re.MULTILINE),
        {
            str(place): (filesystem(place), shutil.disk_usage(place).free // 10**9)
            for place in sorted(folders)
            if place.is_absolute() and os.access(place, os.W_OK)
        },
        "MODULESHOME" in os.environ,
        filesystem(Path()),
        next((each.asked for each in SCHEDULERS.values() if shutil.which(each.asked.split()[0])), ""),
    )


def ask(*words: str) -> str:
    """Return what a program says, empty where there is none or it fails."""
    with suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=30, check=False)
        return "" if told.returncode else told.stdout + told.stderr
    return ""


def filesystem(place: Path) -> str:
    return ask("stat", "-f", "-c", "%T", str(place)).strip()


def nodes(scheduler: str) -> Iterator[str]:
    """Yield a text for each kind of node that a scheduler names."""
    if scheduler == "slurm":
        for line in ask("sinfo", "-h", "-o", "%R|%D|%c|%G|%l").splitlines():
            partition, count, cores, gpus, limit = line.replace("(null)", "no GPU").split("|")
            yield f"partition {partition}: {count} nodes, {cores} cores, {gpus} on each; at most {limit}"
    elif scheduler == "pbs":
        blocks = re.split(r"\n(?=\S)", ask("pbsnodes", "-a"))
        have = [dict(re.findall(r"resources_available\.(\w+) = (\S+)", block)) for block in blocks]
        alike = Counter((each["ncpus"], each.get("ngpus", "0")) for each in have if "ncpus" in each)
        yield from (f"{count} nodes, {cores} cores, gpu:{gpus} on each" for (cores, gpus), count in alike.items())
    elif scheduler == "flux":
        yield ask("flux", "resource", "info").strip()


def lacking(site: Site) -> Iterator[str]:
    """Yield one line for each thing that is not there, with what to do."""
    if not site.scheduler:
        which = f"that answers ('{site.silent}' fails)" if site.silent else "(sbatch, qstat or flux on PATH)"
        yield f"a scheduler {which}: look where jobs are handed in, or start with mpirun"
    own = "pmix" if site.mpi.startswith("Open MPI") else "pmi2"
    if site.unstarted and not (site.mpi and own in site.kinds):
        yield site.unstarted
    elif site.scheduler == "slurm" and own not in site.kinds:
        why = "--server-apart and hpcfl sweep --pack need it; ask those who run Slurm for that plugin"
        yield f"srun --mpi={own}, for {site.mpi}: {why}"
    if site.scheduler and site.gpus and not re.search(r"gpu:\D*[1-9]|[1-9]\d* GPU", " ".join(site.nodes)):
        yield "GPUs that the scheduler knows of, though this host has some: ask the site how jobs name them"
    if all(kind in IN_MEMORY for kind, _ in site.scratch.values()):
        yield "a node's own disk, as far as this host shows: what --stage copies would be in memory"
    if site.scheduler and site.here in OF_ONE_HOST:
        yield f"a shared folder: this one is on {site.here}, and run folders have to be where all nodes see them"


def report(site: Site) -> list[str]:
    """The lines to print: what was found, what is lacking, and which script suits."""
    known = SCHEDULERS.get(site.scheduler)
    rows = [
        ("scheduler", f"{known.title} {site.version}" if known else "none"),
        *(("nodes", text) for text in site.nodes),
        *([("srun --mpi", " ".join(site.kinds))] if site.kinds else []),
        ("MPI", f"mpi4py loads {site.mpi or 'none'}, started by {site.starts or 'nothing here'}"),
        ("GPU", f"{', '.join(site.gpus) or 'none'} on this host, by nvidia-smi"),
        ("scratch", " · ".join(f"{place} ({kind}, {free} GB free)" for place, (kind, free) in site.scratch.items())),
        ("modules", "yes" if site.modules else "none"),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows]
    script = f"hpcfl doctor --site -o {known.script}" if known else "hpcfl doctor --site -o FILE --scheduler NAME"
    return [*lines, *(f"lacking: {line}" for line in [*lacking(site)] or ["nothing"]), f"a script: {script}"]


def write(path: Path, scheduler: str | None = None, stage: Path | None = None, **shape: Any) -> str:
    """Write a `script`; return a line that says so."""
    scheduler = scheduler or look().scheduler
    if not scheduler:
        raise UsageError("-o: no scheduler found here: expected --scheduler slurm, pbs or flux")
    text = script(scheduler, **shape).replace(f"jobs/{scheduler}/{SCHEDULERS[scheduler].script}", str(path))
    if stage:
        check_environment(stage)
        text = text.replace('"${STAGE:=}"', f'"${{STAGE:={stage.resolve()}}}"')
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"-o '{path}': {error.strerror}") from None
    return f"{path}: a job script for {SCHEDULERS[scheduler].title}; its first lines say how to hand it in"


def script(
    scheduler: str, time: str | None, nodes: int | None, ranks: int | None, gpus: int | None, apart: bool
) -> str:
    """Return a scheduler's job script for `nodes` with so many ranks and GPUs each, with `apart` beside a server's.

    Without `ranks` there is one for each GPU, and one more where a single node has the server too.
    """
    time, nodes, gpus = time or "01:00:00", nodes or 1, gpus or 0
    hours, minutes, seconds = map(int, time.split(":")) if re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", time) else (0, 0, 0)
    if (minutes := hours * 60 + minutes + (seconds > 0)) < LEAST:
        raise refusal("--time", f"HH:MM:SS, {LEAST} minutes or more", time, f"00:0{LEAST}:00")
    if apart and scheduler == "flux":
        raise UsageError("--server-apart: slots of Flux are alike: expected --scheduler slurm or pbs")
    package = Path(str(resources.files("hpcfl")))
    jobs = package / "presets" if (package / "presets").is_dir() else package.parent / "jobs"  # a wheel, or a checkout
    text = (jobs / scheduler / SCHEDULERS[scheduler].script).read_text(encoding="utf-8")
    ranks = ranks or (gpus + (nodes == 1 and not apart) if gpus else RANKS)
    start = SCHEDULERS[scheduler].directive
    values: dict[str, object] = {"nodes": nodes, "ntasks-per-node": ranks, "time": time, "gpus-per-node": gpus}
    if scheduler == "slurm" and apart:
        clients = [f"{start}{key}={value}\n" for key, value in values.items() if value]
        text = text.replace("\nset -", f"\n#SBATCH hetjob\n#SBATCH --requeue\n{''.join(clients)}set -", 1)
        values = {"ntasks-per-node": 1, "time": time}
    elif scheduler == "pbs":
        chunk = f"{nodes}:ncpus={ranks}:mpiprocs={ranks}:ompthreads=1" + f":ngpus={gpus}" * (gpus > 0)
        values = {"select": "1:ncpus=1:mpiprocs=1:ompthreads=1+" * apart + chunk, "walltime": time}
    elif scheduler == "flux":
        text = text.replace(f"\nranks={RANKS} ", f"\nranks={ranks} ")
        values = {"nodes": nodes, "nslots": nodes, "cores-per-slot": ranks, "gpus-per-slot": gpus}
        values["time-limit"] = f"{minutes}m"
    for key, value in values.items():
        line = rf"^#?{start.replace(': ', ': (?:# )?')}{key}=.*"  # with a # more, or before the key, where it is off
        text = re.sub(line, f"{start}{key}={value}", text, count=1, flags=re.MULTILINE) if value else text
    return text


def check_environment(stage: Path) -> None:
    """Raise UsageError unless a file is a tar of a Python environment."""
    try:
        with tarfile.open(stage) as tar:
            if any(member.name.removeprefix("./") == "bin/python" for member in tar):
                return
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"--stage '{stage}': {getattr(error, 'strerror', None) or 'not a tar'}") from None
    raise UsageError(f"--stage '{stage}': expected bin/python in it, as from tar -C .venv -cf env.tar .")

"""A run in one file: a ZIP archive of what readers need, which they open like a folder.

It has rows, the checkpoints that are kept and what scripts have given as source, no data. What is read of it is what a
run folder holds, unpacked to a folder of this process's that goes with it.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import h5py

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import replace

OURS = re.compile(
    r"run\.h5|status|manifest\.json|error\.txt|metrics/segment-\d+\.h5|code/[\w/]+\.py|initial-[0-9a-f]{8}(\.\w+)?"
    r"|checkpoints/round-\d+/(server\.h5|rank-\d+\.h5|manifest\.json|beside\.json)"
)
"""Names of what is unpacked; all else is left where it is."""
SMALL, RATIO = 64 << 20, 100
"""Bytes that an archive may unpack to, or so many times as many as it has."""
_unpacked: dict[tuple[str, int, int], Path] = {}


def write(run_dir: Path, path: Path) -> None:
    """Write a run to an archive, which becomes visible whole."""
    names = (each.relative_to(run_dir).as_posix() for each in sorted(run_dir.rglob("*")) if each.is_file())
    with replace(path) as new, zipfile.ZipFile(new, "w") as archive:
        for name in filter(OURS.fullmatch, names):
            archive.write(run_dir / name, name)


def unpacked(path: Path) -> Path:
    """Return the run folder that an archive unpacks to, which may have one folder around all of it.

    A run.h5 of another name is an archive of that alone. UsageError where it is none of a run, or claims more than it
    can have.
    """
    about = path.stat()
    version = str(path.resolve()), about.st_mtime_ns, about.st_size
    if version in _unpacked:
        return _unpacked[version]
    made = Path(tempfile.mkdtemp(prefix="hpcfl-archive-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = made / path.stem  # by which name it is shown
    try:
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                if "segments" not in file.attrs:
                    raise UsageError(f"'{path}' is no run's table")
            folder.mkdir()
            shutil.copyfile(path, folder / "run.h5")
            return _unpacked.setdefault(version, folder)
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            tops = sorted((str(PurePosixPath(name).parent) for name in infos if name.endswith("run.h5")), key=len)
            if not tops:
                raise UsageError(f"'{path}' is no run's archive: there is no run.h5 in it")
            prefix = "" if tops[0] == "." else f"{tops[0]}/"
            ours = {name: name.removeprefix(prefix) for name in infos if name.startswith(prefix)}
            ours = {name: own for name, own in ours.items() if OURS.fullmatch(own)}
            if (size := sum(infos[name].file_size for name in ours)) > max(SMALL, RATIO * about.st_size):
                raise UsageError(
                    f"'{path}' claims {size} bytes of {about.st_size}: expected at most {RATIO} times as many"
                )
            for name, own in ours.items():
                (folder / own).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, (folder / own).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"'{path}' cannot be read as a run: {' '.join(str(error).split())}") from None
    return _unpacked.setdefault(version, folder)


def check_folder(run_dir: Path) -> None:
    """Raise UsageError for what an archive was unpacked to: what is written there would be lost."""
    for (name, *_), folder in _unpacked.items():
        if run_dir.resolve() == folder.resolve():
            raise UsageError(
                f"'{name}' is an archive, to which nothing can be written: expected a folder; unzip it first"
            )

"""Run folders from somebody else whose files are not what hpcfl writes: one line says so, and nothing else happens."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from hpcfl.base.errors import UserError
from hpcfl.commands.cli import main
from hpcfl.store import growing_file, inside, manifest, reading, write_status
from hpcfl.testing.runs import table, toml
from strange.test_folders import content, listed_anew, swapped

SMALL = {
    "clients": 3,
    "rounds": 2,
    "algorithm": {"name": "fedrep", "batch": 512, "tune_epochs": 1},
    "model": {"name": "mlp", "hidden": [4]},
    "participation": {},
    "checkpoint": {"every": 1, "keep": 2},
}
VALUES = {**table("fedavg", "mlp", False), **SMALL}
DEEP = "[" * 1_000_000
RUN, SEGMENT, NEWEST = "run.h5", "metrics/segment-000.h5", "checkpoints/round-000002"
SERVER, RANK, BESIDE = f"{NEWEST}/server.h5", f"{NEWEST}/rank-0000.h5", f"{NEWEST}/beside.json"
Act = Callable[[Path], None]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played") / "run"
    hpcfl.run(VALUES, out=folder, quiet=True)
    return folder


# ---- what is done to a folder: each returns a function of it


def attribute(name: str, value: Any = None, file: str = RUN) -> Act:
    """Set an attribute of an HDF5 file, or remove it."""

    def act(run: Path) -> None:
        with h5py.File(run / file, "r+") as opened:
            opened.attrs.pop(name, None)
            if value is not None:
                opened.attrs[name] = value

    return act


def config(change: Callable[[dict[str, Any]], Any]) -> Act:
    """Change the table in JSON that is the config."""

    def act(run: Path) -> None:
        with h5py.File(run / RUN, "r+") as opened:
            values = json.loads(opened.attrs["config"])
            changed = change(values)
            opened.attrs["config"] = json.dumps(values if changed is None else changed)

    return act


def dataset(file: str, name: str, data: Any = None, **how: Any) -> Act:
    """Put something else in the place of a dataset, or nothing."""

    def act(run: Path) -> None:
        with h5py.File(run / file, "r+") as opened:
            attributes = {
                key: value
                for key, value in opened[name].attrs.items()
                if key not in ("REFERENCE_LIST", "DIMENSION_LIST")
            }
            del opened[name]
            if data is not None or how:
                opened.create_dataset(name, data=data, **how).attrs.update(attributes)

    return act


def group(file: str, name: str) -> Act:
    def act(run: Path) -> None:
        with h5py.File(run / file, "r+") as opened:
            del opened[name]
            opened.create_group(name)

    return act


def unscaled(run: Path) -> None:
    with h5py.File(run / RUN, "r+") as file:
        swapped(file, "train_samples")


def huge(file: str, name: str) -> Act:
    """Let a dataset claim 1e15 rows, of which none is there."""

    def act(run: Path) -> None:
        with h5py.File(run / file, "r+") as opened:
            dtype, shape = opened[name].dtype, opened[name].shape[1:]
            rows = {"shape": (10**15, *shape), "maxshape": (None, *shape), "chunks": (1024, *shape)}
        dataset(file, name, dtype=dtype, fillvalue=np.zeros(1, dtype)[0], **rows)(run)

    return act


def looped(run: Path) -> None:
    """Groups that hold each other: to visit all names takes for ever."""
    with h5py.File(run / RUN, "r+") as file:
        made = file.create_group("loop")
        for number in range(20):
            made[str(number)] = made


def nested(run: Path) -> None:
    with h5py.File(run / RUN, "r+") as file:
        inner = file
        for _ in range(3000):
            inner = inner.create_group("g")


def folder(name: str) -> Act:
    """Put a folder in the place of a file."""

    def act(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir(parents=True)

    return act


def pipe(name: str) -> Act:
    """Put a pipe in the place of a file: to open it would take for ever."""

    def act(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return act


def text(name: str, said: str | bytes, cut: int | None = None) -> Act:
    """Put some text in the place of a file; without any, so many bytes of its own."""

    def act(run: Path) -> None:
        own = (run / name).read_bytes()[:cut] if cut is not None else b""
        (run / name).write_bytes(own or (said if isinstance(said, bytes) else said.encode()))

    return act


def file_for(name: str) -> Act:
    """Put a file in the place of a folder."""

    def act(run: Path) -> None:
        shutil.rmtree(run / name)
        (run / name).write_text("nothing")

    return act


def header(change: Callable[[dict[str, Any]], Any]) -> Act:
    """Put a growing segment in the place of the sealed one; what it says of itself is changed, its digest too."""

    def act(run: Path) -> None:
        path = run / SEGMENT
        part = reading.read_part(path)
        path.unlink()
        growing_file.lay_out(path, part.columns, part.coords, 0, 2, 10, inside.run_of(run))
        with path.open("r+b") as raw:
            size = int(raw.read(128)[len(growing_file.MAGIC) :].split(b" ")[0])
            about = json.loads(raw.read(size))
            new = json.dumps(change(about) or about).encode().ljust(size)
            raw.seek(0)
            raw.write(growing_file._line(new) + new)

    return act


def renumbered(name: str) -> Act:
    """Give the newest checkpoint another name."""

    def act(run: Path) -> None:
        (run / "checkpoints" / "round-000002").rename(run / "checkpoints" / name)

    return act


def beside(said: str) -> Act:
    return text(BESIDE, said)


def listed(change: Callable[[dict[str, Any]], Any]) -> Act:
    """Change what the manifest lists, and its digest."""

    def act(run: Path) -> None:
        files = json.loads((run / manifest.NAME).read_text())["files"]
        files = change(files) or files
        (run / manifest.NAME).write_text(manifest._text(files))

    return act


def timeless(run: Path) -> None:
    with h5py.File(run / SERVER, "r+") as file:
        for name in [*file["clock"].attrs]:
            del file["clock"].attrs[name]


def long(run: Path) -> None:
    os.truncate(run / "status", 10**8)


def rows_of(value: Any) -> Act:
    return attribute("parts", json.dumps({"segment-000.h5": {"first": 0, "rounds": 2, "rows": value}}))


def claimed(run: Path) -> None:
    """A damaged segment of which run.h5 claims more rounds than memory holds."""
    rows_of([[0, 10**15]])(run)
    text(SEGMENT, "", cut=3000)(run)


TAMPERED: dict[str, tuple[Act, str]] = {
    # run.h5: the table
    "a fact without its scale": (unscaled, "run.h5"),
    "a fact of other clients": (dataset(RUN, "train_samples", np.arange(5)), "run.h5"),
    "a number for a fact": (dataset(RUN, "train_samples", 7), "run.h5"),
    "a fact of 1e15 clients": (huge(RUN, "train_samples"), "run.h5"),
    "a group for a fact": (group(RUN, "train_samples"), "run.h5"),
    "a group for a scale": (group(RUN, "client"), "run.h5"),
    "no fact": (dataset(RUN, "train_samples"), ""),
    "groups in a loop": (looped, "run.h5"),
    "groups in groups": (nested, "run.h5"),
    # run.h5: attributes
    "no config": (attribute("config"), "config"),
    "no segments": (attribute("segments"), "segments"),
    "a config of numbers": (attribute("config", np.arange(3)), "config"),
    "a config that is null": (attribute("config", "null"), "config"),
    "a config that is no JSON": (attribute("config", "{"), "config"),
    "a config that is no text": (attribute("config", np.bytes_(b"\xff\xfe{}")), "config"),
    "a config with a section that is a list": (config(lambda values: values.update(model=[1])), "model"),
    "a config without rounds": (config(lambda values: values.pop("rounds") and None), "rounds"),
    "a config with a key of its own": (config(lambda values: values.update(rouns=1)), "rouns"),
    "a config 1e6 deep": (attribute("config", "[" * 60_000), "config"),
    "segments that are no JSON": (attribute("segments", "["), "segments"),
    "parts that are a list": (attribute("parts", "[]"), "parts"),
    "rows that are words": (rows_of("all"), "parts"),
    "rows by the 1e15": (claimed, "rounds are said to be there"),
    "sealed that is a word": (attribute("sealed", "yes"), "sealed"),
    "hosts that are a number": (attribute("hosts", 7), "hosts"),
    "versions that are a list": (attribute("versions", "[]"), "versions"),
    "samples that are a list": (attribute("samples", "[]"), "samples"),
    "tensors that are null": (attribute("tensors", "null"), "tensors"),
    "a chunk that is a word": (attribute("chunk", "many"), "chunk"),
    "code that is a list": (attribute("code", "[]"), "code"),
    "code of no file": (attribute("code", '{"a:b": {"file": "a.py", "sha256": "0"}}'), "code"),
    "a history of words": (attribute("history", '["x"]'), "history"),
    "a chunk of none": (attribute("chunk", "0"), "chunk"),
    "computing by nothing": (attribute("computing", '{"how": "quickly"}'), "computing"),
    # segments
    "a column of other rounds": (dataset(SEGMENT, "loss", np.zeros(5)), "segment-000.h5"),
    "a column of another rank": (dataset(SEGMENT, "arrived", np.zeros(2, "i1")), "segment-000.h5"),
    "a group for a column": (group(SEGMENT, "loss"), "segment-000.h5"),
    "no column": (dataset(SEGMENT, "loss"), "segment-000.h5"),
    "a column of 1e15 rows": (huge(SEGMENT, "loss"), "segment-000.h5"),
    "rounds by the 1e15": (huge(SEGMENT, "round"), "segment-000.h5"),
    "rounds below 0": (dataset(SEGMENT, "round", np.array([-7, -6])), "segment-000.h5"),
    "a header 1e6 deep": (dataset(SEGMENT, "header", np.frombuffer(DEEP.encode(), "u1")), "segment-000.h5"),
    "a segment from round -5 on": (attribute("first", -5, SEGMENT), "segment-000.h5"),
    "a segment for 1e15 rounds": (attribute("rounds", 10**15, SEGMENT), "segment-000.h5"),
    "lost rounds of words": (attribute("lost", '["a"]', SEGMENT), "segment-000.h5"),
    "events of numbers": (dataset(SEGMENT, "log/events", np.arange(3)), "its events are lost"),
    "a growing segment without columns": (header(lambda about: about.pop("columns") and None), "segment-000.h5"),
    "a growing segment with rows of no bytes": (
        header(lambda about: about.update(rows=[0, 2, 0, 8])),
        "segment-000.h5",
    ),
    # checkpoints
    "a checkpoint without its times": (timeless, "round-000002"),
    "weights of words": (dataset(SERVER, "shared/fc1.bias", ["a"] * 4), "server.h5"),
    "weights of another shape": (dataset(SERVER, "shared/fc1.bias", np.zeros(3, "f4")), "fc1.bias"),
    "weights by the 1e15": (huge(SERVER, "shared/fc1.bias"), "server.h5"),
    "homes below 0": (dataset(SERVER, "homes", np.full(3, -7)), "rank--007.h5"),
    "personal state of words": (dataset(RANK, "personal/000/tensors/fc2.bias", ["a"] * 3), "rank-0000.h5"),
    "a round of NaN": (attribute("round", np.nan, SERVER), "round-000002"),
    "a round that is text": (attribute("round", "2", SERVER), "round-000002"),
    "beside 1e6 deep": (beside(DEEP), "beside.json"),
    "a checkpoint of round 1e30": (renumbered("round-1" + "0" * 30), "round-1"),
    "a checkpoint that is a file": (file_for("checkpoints/round-000002"), "round-000002"),
    "checkpoints that are a file": (file_for("checkpoints"), "checkpoints"),
    "metrics that are a file": (file_for("metrics"), "metrics"),
    # files
    **{f"a folder for {name}": (folder(name), name) for name in ("status", "stop", "error.txt")},
    **{f"a folder for {name}": (folder(name), Path(name).name) for name in (RANK,)},
    **{f"a pipe for {name}": (pipe(name), name) for name in (RUN, "status", "lock")},
    **{f"a pipe for {name}": (pipe(name), Path(name).name) for name in (SEGMENT, BESIDE)},
    **{f"nothing in {name}": (text(name, ""), Path(name).name) for name in (RUN, SEGMENT)},
    **{f"half of {name}": (text(name, "", 1500), Path(name).name) for name in (RUN, SEGMENT)},
    **{f"text for {name}": (text(name, "hello\n"), Path(name).name) for name in (RUN,)},
    "a status of 100 MB": (long, "status"),
    "a status of bytes": (text("status", bytes(range(256)) * 9), "status"),
    "a manifest 1e6 deep": (text(manifest.NAME, DEEP), manifest.NAME),
    "a manifest that is a list": (listed(lambda files: [*files]), manifest.NAME),
    "a manifest of bytes below 0": (listed(lambda files: files[RUN].update(bytes=-1)), manifest.NAME),
    "a manifest of numbers": (listed(lambda files: files.update({RUN: 7})), manifest.NAME),
    "a manifest of odd names": (listed(lambda files: files.update({"a\0b": files[RUN]})), manifest.NAME),
}


def tampered(run: Path, name: str) -> Path:
    """Tamper with a run; whoever does that writes the digests too."""
    TAMPERED[name][0](run)
    if "manifest" not in name:
        with suppress(OSError):  # of what is no file there is none
            listed_anew(run)
    return run


# ---- what Python is asked to do meanwhile

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect")
STARTS += ("pickle.find_class",)
CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
CHANGES |= {"os.truncate": 1, "os.chmod": 1, "os.chown": 1, "shutil.rmtree": 1, "shutil.move": 2}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_seen: list[tuple[str, str]] | None = None


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in STARTS:
        _seen.append((event, repr(args)))
    elif event == "open" and isinstance(args[2], int) and args[2] & WRITES and not isinstance(args[0], int):
        _seen.append((event, str(Path(os.fsdecode(args[0])).absolute())))
    elif event in CHANGES and not (event == "os.mkdir" and os.path.lexists(args[0])):  # which is no change
        _seen.extend((event, str(Path(os.fsdecode(path)).absolute())) for path in args[: CHANGES[event]])


@contextmanager
def watched(allowed: Sequence[Path]) -> Iterator[None]:
    """Fail where something is started, or written outside some folders."""
    global _seen
    if _note not in installed:
        installed.append(_note)
        sys.addaudithook(_note)  # it cannot be taken back
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    odd = [each for each in seen if each[0] in STARTS or not any(map(Path(each[1]).is_relative_to, allowed))]
    assert not odd, odd[:3]


installed: list[Any] = []


@contextmanager
def bounded(seconds: int = 30, more: int = 8 << 30) -> Iterator[None]:
    """Fail instead of waiting, or taking memory, for ever."""

    def late(*_: Any) -> None:
        raise TimeoutError("this takes for ever")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


# ---- the tests

READING = [["show", "--groups"], ["verify"], ["plot", "-o", "p.png"], ["adapt", "--client", "all"], ["stop"]]
PYTHON: list[Callable[[Path], Any]] = [
    hpcfl.open_run,
    lambda run: hpcfl.open_models(run).module(0),
    lambda run: hpcfl.Run(run).state_dict(0),
]


@pytest.fixture
def place(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, a config of them, and something else that is dear to somebody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    toml(VALUES, tmp_path / "odd.toml")
    (tmp_path / "decoy").mkdir()
    (tmp_path / "decoy" / "thesis").write_text("precious")
    shutil.copytree(played, tmp_path / "runs" / "well")
    return tmp_path


def fresh(place: Path, played: Path, name: str) -> Path:
    run = place / "runs" / "odd"
    shutil.rmtree(run, ignore_errors=True)
    return tampered(Path(shutil.copytree(played, run)), name)


@pytest.mark.parametrize("name", TAMPERED)
def test_of_a_tampered_run_one_line_is_said(name: str, place: Path, played: Path, capsys: Any, caplog: Any) -> None:
    said: list[str] = []
    run, runs = fresh(place, played, name), str(place / "runs")
    before = content(place / "decoy"), content(place / "runs" / "well")

    def carried_out(words: list[str]) -> str:
        inside.told.clear()
        code = main(words)
        out, err = capsys.readouterr()
        assert code in (0, 1, 2), words
        lines = err.splitlines()
        assert all(line.startswith("hpcfl: ") and line.isprintable() for line in lines), lines
        refused = [line for line in lines if line.removeprefix("hpcfl: ") not in inside.told]
        assert code == 0 or words[0] == "verify" or len(refused) == 1, lines
        said.extend([*lines, *out.splitlines()])
        return str(out)

    with watched([run, place / "p.png"]), bounded():
        for words in READING:
            carried_out([words[0], str(run), *words[1:]])
        carried_out(["sweep", "odd.toml", "--out", runs, "--list"])
        for call in PYTHON:
            with suppress(UserError):
                call(run)
        carried_out(["seal", str(run)])
    fresh(place, played, name)
    with watched([run]), bounded():
        assert '/well"' in carried_out(["show", "--json", runs])
        assert "/well: 6 files, none is damaged" in carried_out(["verify", runs])
        carried_out(["resume", str(run), "--rounds", "3", "--quiet"])
    assert (content(place / "decoy"), content(place / "runs" / "well")) == before
    assert not [each for each in [*sys.modules.values()] if str(getattr(each, "__file__", "")).startswith(str(place))]
    assert any(TAMPERED[name][1] in line for line in [*said, *caplog.messages]), said


def test_what_is_watched_is_seen(tmp_path: Path) -> None:
    for act in (lambda: (tmp_path / "x").touch(), lambda: subprocess.run(["true"]), lambda: (tmp_path / "x").unlink()):
        with pytest.raises(AssertionError), watched([tmp_path / "run"]):
            act()
    with pytest.raises(MemoryError), bounded():
        np.ones(10**15, "u1")


# ---- what is printed

TITLE = "\x1b]0;pwned\x07\x1b[2J\x9b31m"


def named(run: Path) -> None:
    """Let names in a run obey a terminal: its method's, its host's, its data's folder's, its reason's."""
    with h5py.File(run / RUN, "r+") as file:
        values = json.loads(file.attrs["config"])
        values["algorithm"]["name"] = values["model"]["name"] = f"fedrep{TITLE}"
        file.attrs["config"] = json.dumps(values)
        file.attrs["code"] = json.dumps({f"a{TITLE}:b": {"file": f"/{TITLE}.py", "sha256": TITLE}})
    write_status(run, "running", TITLE)
    status = (run / "status").read_text().replace(socket.gethostname(), f"host{TITLE}").splitlines()
    fields = "\n".join([status[0], *status[2:], ""])
    (run / "status").write_text("\n".join([status[0], f"check: {zlib.crc32(fields.encode()):08x}", *status[2:], ""]))
    listed_anew(run)


@pytest.mark.filterwarnings("ignore:Glyph")  # of the picture's letters
def test_no_name_reaches_a_terminal_as_it_is(played: Path, tmp_path: Path, capfd: Any) -> None:
    run = Path(shutil.copytree(played, tmp_path / f"run{TITLE}"))
    named(run)
    config = toml({**VALUES, "model": {"name": f"mlp{TITLE}"}}, tmp_path / f"c{TITLE}.toml")
    for word in ("show", "verify", "resume", "adapt", "stop", "seal", "run"):
        main([word, str(run)])
    main(["plot", str(run), "-o", str(tmp_path / "p.svg")])
    for words in (["check", str(config)], ["sweep", str(config), "--out", str(tmp_path), "--list"], ["show", TITLE]):
        assert main(words) != 0
    assert main(["--debug", "check", str(config)]) != 0
    said = "".join(capfd.readouterr())
    assert "\\x1b]0;pwned\\x07\\x1b[2J\\x9b31m" in said
    assert "running on host" in said or "process" in said
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_a_bar_moves_the_cursor_and_its_words_do_not(tmp_path: Path) -> None:
    import pty

    code = (
        "import sys; from hpcfl.base import terminal; terminal.install()\n"
        "from hpcfl.engine.record import Reporter\n"
        f"report = Reporter(2, 0, 'simulated'); report.warn('odd', {TITLE!r}); print({TITLE!r}, file=sys.stderr)\n"
        "report.close(); print('done' + chr(27))"
    )
    pid, end = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "TERM": "xterm"})
    said = b""
    with suppress(OSError):  # which is how a terminal ends
        while piece := os.read(end, 4096):
            said += piece
    os.waitpid(pid, 0)
    os.close(end)
    assert b"\x1b[?25l" in said  # the bar's own
    assert re.sub(rb"\x1b\[[0-9;]*m", b"", said).count(b"pwned\\x07\\x1b[2J\\x9b31m") == 2
    assert b"\x1b]0" not in said
    assert said.endswith(b"done\\x1b\r\n")


# ---- what is deleted


def test_no_more_is_deleted_than_a_manifest_lists(tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    hpcfl.run({**VALUES, "checkpoint": {"every": 1, "keep": 1}}, out=run, quiet=True)
    own, outside = run / NEWEST / "notes.txt", tmp_path / "thesis"
    own.write_text("mine")
    outside.write_text("precious")
    (run / NEWEST / "old").mkdir()
    (run / NEWEST / "old" / "server.h5").write_text("mine too")
    caplog.clear()
    assert main(["resume", str(run), "--rounds", "4", "--quiet"]) == 0
    left = run / "checkpoints" / "left-1-round-000002"
    assert sorted(path.name for path in left.rglob("*")) == ["notes.txt", "old", "server.h5"]
    assert sorted(path.name for path in left.parent.iterdir()) == [left.name, "round-000004"]
    (line,) = [line for line in caplog.messages if "did not list" in line]
    assert line.startswith(f"'{left}' holds what the manifest of round-000002 did not list")
    assert hpcfl.open_run(run).sizes["round"] == 4
    assert main(["verify", str(run)]) == 0

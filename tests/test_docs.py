"""What README and docs say to type, and where they point.

The lines of their shell blocks go through a shell in which programs only note what they were called with, so loops,
braces and comments are the shell's. Then, in a folder of its own for each page and all in one process,

- `hpcfl run` is carried out for two rounds, and `resume`, `show`, `plot`, `adapt`, `seal`, `list`, `check`, `doctor`
  and `optimum` as they stand, on what such runs left; `stop` has to find that its run has ended;
- Python blocks are carried out on what the shell blocks before them left; those which a page says to save are saved.

Of a `sweep` the first run is carried out so, and `--list` checks the configs of all; of a batch script the command that
it calls. What stands behind `mpirun` is carried out alone; with its ranks, under Open MPI, the README's first such line
and the runs in real time. Data sets that are not bundled are small made-up files of their formats.

Judged only: `demo`, what takes the folders of sweeps (by its options), and `doctor --network`, whose file is made by
hand. Other programs are not started: scripts and make's targets have to be there.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

import hpcfl
from helpers.cells import run_cell
from helpers.launcher import ROOT, job, mpis
from helpers.networks import FOUND, written
from hpcfl.base import plugins
from hpcfl.commands import sweep as sweeps
from hpcfl.commands.cli import cli, main
from hpcfl.config import load
from hpcfl.contrib.network.measure import document
from hpcfl.learning.task import Task
from test_presets import images

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("hpcfl", "mpirun", "mpiexec", "sbatch", "srun", "make", "python", "pytest", "pip")
KEYS = {"with": "overlays", "set": "settings"}
BATCH = {"run.sbatch": "run", "sweep.sbatch": "sweep"}
OVER = {"--set": "settings", "--with": "overlays"}
TWO_ROUNDS = ["--set", "rounds=2", "--set", "evaluate.every=1"]
Words = list[str]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: what follows the fence's ticks, the lines within, and as what file the text says to save it."""

    language: str
    text: str
    file: str = ""


def blocks(page: Path) -> list[Block]:
    parts = re.split(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    saved = [re.search(r"Save it as\s`([\w.]+)`:\s*$", before) for before in parts[::3]]
    return [
        Block(language.strip(), text, name[1] if name else "")
        for language, text, name in zip(parts[1::3], parts[2::3], saved)
    ]


def prose(page: Path) -> str:
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in MNIST's format."""
    home = tmp_path_factory.mktemp("data")
    images(home / "mnist", "", "train", np.arange(50_000) % 10)
    images(home / "mnist", "", "t10k", np.arange(200) % 10)
    return home


@pytest.fixture
def typed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder that has what the docs take for granted, as a process alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCFL_DATA", str(data))
    monkeypatch.setenv("MPLBACKEND", "agg")
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)
    for place in (".venv/bin", ".mpi/openmpi/bin", ".mpi/mpich/bin"):
        Path(place).mkdir(parents=True)
        for program in PROGRAMS:
            stub = Path(place, program)
            stub.write_text('#!/bin/sh\nprintf "%s\\037" "${0##*/}" "$@" >>"$NOTED"; echo >>"$NOTED"\n')
            stub.chmod(0o755)
    Path(".venv/bin/activate").touch()
    Path("my.toml").write_text("base = 'salf-digits'")
    for page in sorted((ROOT / "docs" / "howto").glob("own-*.md")):
        for block in blocks(page):
            if block.file:
                Path(block.file).write_text(block.text, encoding="utf-8")
    monkeypatch.setattr(plugins, "_folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def noted(text: str, here: Path) -> list[Words]:
    """Return the words of each program that a shell starts for these lines."""
    notes = here / "noted"
    notes.write_text("")
    path = f"{here}/.venv/bin:/usr/bin:/bin"
    ended = subprocess.run(
        ["bash", "-eu", "-c", text], cwd=here, env={"PATH": path, "NOTED": str(notes), "DATA": os.environ["HPCFL_DATA"]}
    )
    assert ended.returncode == 0, text
    return [line.split("\037")[:-1] for line in notes.read_text().splitlines()]


def without_launcher(words: Words) -> Words:
    """Return what `mpirun`, `mpiexec` or `srun` starts, from the program on; other words as they are."""
    if words[0] not in ("mpirun", "mpiexec", "srun"):
        return words
    place = next(place for place, word in enumerate(words) if Path(word).name in ("hpcfl", "python"))
    return [Path(words[place]).name, *words[place + 1 :]]


def parsed(arguments: Words) -> click.Context:
    """Return a command's options and arguments; AssertionError where the command line refuses them."""
    command = cli.commands.get(arguments[0])
    assert command, f"no such command: hpcfl {arguments[0]}"
    try:
        return command.make_context(arguments[0], arguments[1:])
    except click.ClickException as error:
        raise AssertionError(f"hpcfl {' '.join(arguments)}: {error.format_message()}") from None


def carry_out(arguments: Words, listed: set[Path]) -> None:
    """Carry out or judge a command of hpcfl, as the module's docstring says; `listed`: the folders of sweeps so far."""
    asked = parsed(arguments).params
    name, folders = arguments[0], [Path(each) for each in asked.get("folders", ())]
    if name == "run":
        config = load(asked["config"], asked["settings"], asked["overlays"])
        if config.clock == "wall":
            settings, overlays = ([f"{option}={each}" for each in asked[name]] for option, name in OVER.items())
            arguments = ["check", asked["config"], *overlays, *settings]
        else:
            arguments = [*arguments, *TWO_ROUNDS, "--quiet"]
    elif name == "sweep":
        own = {key: value for key, value in asked.items() if key not in ("jobs", "launcher", "pack", "listing", "only")}
        first = sweeps.runs(**own)[0]
        carry_out(["run", *first.what, "--out", f"{first.folder}-first", "--resume"], listed)
        if "--pack" in arguments:  # it needs an allocation: tests/commands/test_sweep.py
            del arguments[(place := arguments.index("--pack")) : place + 2]
        arguments = [*arguments, "--list"]
        listed.add(asked["out"])
    elif name == "demo" or any({folder, folder.parent} & listed for folder in folders):
        return
    elif name == "doctor" and asked["network"]:  # it needs ranks
        written(Path(), document(FOUND), asked["json_to"] or "printed.json")
        return
    code = main(arguments)
    assert code == (2 if name == "stop" else 0), f"hpcfl {' '.join(arguments)}: exit code {code}"


def judge(words: Words, targets: set[str], listed: set[Path]) -> None:
    """Carry out or judge what one line started."""
    words = without_launcher(words)
    if words[0] == "hpcfl":
        carry_out(words[1:], listed)
    elif words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif words[0] == "sbatch":
        place = next(place for place, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[place]).exists() or Path(words[place]).exists()  # or written by the line before
        command = BATCH.get(Path(words[place]).name, "run")
        parsed([command, *words[place + 1 :]])
        carry_out([command, *words[place + 1 :]], listed)
    elif words[0] == "python" and words[1] != "-m":
        assert (ROOT / words[1]).exists(), words[1]


@pytest.fixture(scope="session")
def targets() -> set[str]:
    """Make's targets."""
    return set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pages
def test_what_a_page_says_to_type_works(
    page: Path,
    typed: Path,
    targets: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed: set[Path] = set()
    for block in blocks(page):
        assert block.language in ("sh", "python", "text", "toml", "json"), f"{page.name}: ```{block.language}"
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            monkeypatch.setitem(sys.modules, "__main__", main_module := ModuleType("__main__"))
            run_cell(block.text, main_module)
        for words in noted(block.text, typed) if block.language == "sh" else ():
            judge(words, targets, listed)
            if words[:2] == ["hpcfl", "stop"]:
                assert "cannot be stopped: expected a running run" in capsys.readouterr().err


class Trial:
    """What Optuna gives an objective, as far as the page uses it; pruned after so many reports."""

    def __init__(self, number: int, most: int) -> None:
        self.number, self.most, self.reports = number, most, list[tuple[float, int]]()

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> float:
        return 0.2

    def report(self, value: float, step: int) -> None:
        self.reports.append((value, step))

    def should_prune(self) -> bool:
        return len(self.reports) >= self.most


def test_the_objective_of_a_search_prunes(typed: Path) -> None:
    class TrialPruned(Exception):  # noqa: N818
        pass

    (text,) = (block.text for block in blocks(ROOT / "docs" / "howto" / "python.md") if "(trial)" in block.text)
    names: dict[str, Any] = {"hpcfl": hpcfl, "optuna": SimpleNamespace(TrialPruned=TrialPruned)}
    exec(text, names)
    whole, pruned = Trial(1, 99), Trial(2, 2)
    value = names["objective"](whole)
    steps = [step for _, step in whole.reports]
    assert steps == sorted({*steps})
    assert value == whole.reports[-1][0]
    with pytest.raises(TrialPruned):
        names["objective"](pruned)
    assert pruned.reports == whole.reports[:2]


@pages
def test_commands_in_a_pages_text_exist(page: Path) -> None:
    for name, more in re.findall(r"`hpcfl ([a-z]+)\b([^`]*)`", prose(page)):
        assert name in cli.commands, f"hpcfl {name}"
        known = {option for parameter in cli.commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z-]+", more)) <= known, f"hpcfl {name}{more}"


@pytest.mark.launch
@pytest.mark.parametrize("page", ["README.md", "docs/howto/running.md"])
def test_a_launch_works_on_its_ranks(page: str, typed: Path) -> None:
    lines = [words for block in blocks(ROOT / page) if block.language == "sh" for words in noted(block.text, typed)]
    real = [words for words in lines if words[0] == "mpirun" and "wall" in " ".join(words)]
    launches = real or [words for words in lines if words[0] == "mpirun"]
    assert bool(real) == (page != "README.md")
    assert all(words[1] == "-n" for words in launches)
    assert "openmpi" in mpis(), "openmpi is not installed: make setup"
    first = launches[0]
    ended = job("openmpi", int(first[2]), ["-m", "hpcfl", *without_launcher(first)[1:], *TWO_ROUNDS])
    assert ended.code == 0, ended.err
    assert " 2/2 " in ended.out


def targets_of_links(page: Path) -> Iterator[str]:
    yield from re.findall(r"\[[^\]]*\]\(\s*([^)\s]+)\s*\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_inside_the_repository_resolve(page: Path) -> None:
    for link in targets_of_links(page):
        if re.match(r"[a-z]+:", link):  # elsewhere
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name}: {link}"
        assert there.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(there), f"{page.name}: no heading for {link}"


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    assert set(targets_of_links(index)) >= {
        page.relative_to(index.parent).as_posix() for page in PAGES[1:] if page != index
    }


def test_every_path_that_contributors_are_told_of_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:hpcfl|tests|docs|benchmarks)/[\w/.]*)", text)
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_readme_is_short_and_has_two_commands() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 900
    first, after = [block.text for block in blocks(README) if block.language == "sh"][:2]
    assert re.findall(r"^\w.*?(?= +#|$)", first, re.MULTILINE) == ["make demo", "make test"]
    assert after == ". .venv/bin/activate\n"


def test_the_page_on_the_wheel_stands_alone() -> None:
    """No link or picture that leads into the repository, and nothing to make."""
    assert '\nreadme = "docs/package.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"\]\(|<\w|\bmake ", (ROOT / "docs" / "package.md").read_text(encoding="utf-8"))


def test_all_name_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    version, day = (re.search(rf"^{key}: (.*)$", citation, re.MULTILINE)[1] for key in ("version", "date-released"))
    wheels = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {*re.findall(r"hpcfl-([\d.]+)-py3", wheels)} == {version}
    heads = re.findall(r"^##?#? .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"## {version} – {day}" in heads
    allowed = r"# Changelog|## Unreleased|## \d+\.\d+\.\d+ – \d{4}-\d\d-\d\d|### (Added|Changed|Fixed)"
    assert not [head for head in heads if not re.fullmatch(allowed, head)]


def test_licence_and_citation_are_those_of_the_package() -> None:
    licence = re.search(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nlicense: {licence}\n" in citation
    assert citation.count("\n    notes: ") == 4
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


OBJECTS = {"hpcfl": hpcfl, "task": Task}
"""What names in the pages' text stand for, beside classes of the package."""


def classes() -> dict[str, str]:
    """The package's classes, and the module of each; of several of one name the public one."""
    found = {}
    for file in sorted((ROOT / "hpcfl").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^class ([A-Z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = "hpcfl" if name in hpcfl.__all__ else module
    return found


def given(function: Any, known: dict[str, str]) -> Any:
    """Return the class of the package, if it is one, of which a function returns, or yields, objects."""
    named = re.findall(r"\w+", function.__annotations__["return"])
    return next((getattr(import_module(known[name]), name) for name in named if name in known), None)


def member(thing: Any, name: str) -> Any:
    """Return an attribute of a module, or of a class's objects; AssertionError if there is none."""
    known = set(dir(thing))
    if inspect.ismodule(thing):
        with suppress(ImportError):
            return import_module(f"{thing.__name__}.{name}")
    else:
        known |= {*getattr(thing, "__dataclass_fields__", ()), *getattr(thing, "model_fields", ())}
        known |= set(getattr(thing, "__annotations__", ()))
    assert name in known or hasattr(thing, name), f"no '{name}' in {thing.__name__}"
    return getattr(thing, name, None)


def meant(node: ast.expr, known: dict[str, str]) -> Any:
    """Return what an expression is of, None where it is none of the package's; AssertionError for a lost attribute.

    Of what a function returns it is the class.
    """
    if isinstance(node, ast.Name):
        return OBJECTS.get(node.id) or (getattr(import_module(known[node.id]), node.id) if node.id in known else None)
    if isinstance(node, ast.Attribute):
        thing = meant(node.value, known)
        thing = given(thing, known) if inspect.isfunction(thing) else thing
        return None if thing is None else member(thing, node.attr)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("next", "iter"):
            thing = meant(node.args[0], known)
            return given(thing.__iter__, known) if node.func.id == "iter" else thing
        thing = meant(node.func, known)
        return given(thing, known) if inspect.isfunction(thing) else thing
    return None


def expressions(text: str) -> Iterator[ast.expr]:
    """Yield the code in a page's text that is of the package, and "`a` and `b` of `c`" as ``c.a`` and ``c.b``."""
    codes = re.findall(r"`([^`]+)`", text)
    for names, whole in re.findall(r"((?:`\w+`(?:, |,? and ))*`\w+`)\s+of\s+`(hpcfl[^`]*)`", text):
        codes += [f"{whole}.{name}" for name in re.findall(r"\w+", names) if name != "and"]
    for code in codes:
        with suppress(SyntaxError, ValueError):
            yield ast.parse(" ".join(code.split()), mode="eval").body


@pages
def test_every_public_attribute_that_a_page_names_exists(page: Path) -> None:
    known = classes()
    for expression in expressions(prose(page)):
        try:
            meant(expression, known)
        except AssertionError as error:
            raise AssertionError(f"{page.name}: {ast.unparse(expression)}: {error}") from None
    written = "".join((ROOT / "hpcfl" / file).read_text() for file in ("launch/run.py", "store/run_file.py"))
    for name in re.findall(r"attribute `(\w+)`", prose(page)):
        assert f'"{name}"' in written, f"{page.name}: run.h5 has no attribute {name}"


def test_an_attribute_that_is_gone_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for lost in (
        "the `params` of `hpcfl.open_models`",
        "`hpcfl.open_models(run).params`",
        "`next(iter(hpcfl.open_models(run))).weights`",
        "`hpcfl.open_modules`",
        "`Run.weights()`",
        "`task.samples_of(client)`",
        "`client_statistics` and `no_statistics` of `hpcfl.learning.batchnorm`",
        "(attribute `nothing`)",
    ):
        page.write_text(f"A page of {lost}.\n")
        with pytest.raises(AssertionError, match=r"^page\.md: "):
            test_every_public_attribute_that_a_page_names_exists(page)
    page.write_text("`next(iter(hpcfl.open_models(run))).params`, `Run.module()`, `x.y`, (attribute `code`)\n")
    test_every_public_attribute_that_a_page_names_exists(page)

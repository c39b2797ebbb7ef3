"""The runs of the papers: configs that load, lines that say what a run did, and no line that nobody asks for."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import papers
import papers_page
import pytest

import hpcfl
from hpcfl.base.errors import Stopped
from hpcfl.config import load
from hpcfl.config.presets import presets


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Studies of three runs of two rounds, and of a command."""
    arm = {"preset": "fedavg-digits", "kind": "some"}
    case = {"set": {"rounds": 2}, "some": {"set": {"clients": 6}}, "one": {"set": {"evaluate.every": 1}}, "without": []}
    found = {
        "runs": {
            "seeds": [3, 4],
            "set": {"rounds": 9, "evaluate.every": 2},
            "arms": {"one": arm, "two": arm},
            "cases": {"a": case, "b": {**case, "without": ["one"]}},
            "last": ["arrived"],
        },
        "words": {
            "arms": {"it": {"command": "-c \"import json; print('first'); print(json.dumps({{'seed': {seed}}}))\""}}
        },
    }
    monkeypatch.setattr(papers, "studies", lambda paper: found)
    return found


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_each_run_is_a_config(paper: str) -> None:
    every = list(papers.wanted(paper))
    assert not [name for name, count in Counter(every).items() if count > 1]
    for run in {(run.study, run.case, run.arm): run for run in every}.values():
        if "command" not in run.about["arms"][run.arm]:
            preset, overlays, settings = papers.asked_of(run)
            assert load(preset, settings, overlays).seed == run.seed
        else:
            assert (papers.ROOT / run.about["arms"][run.arm]["command"].split()[0]).is_file()


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_each_line_is_of_a_run_and_there_once(paper: str) -> None:
    lines = [papers.identity(line) for line in papers.known(paper)]
    assert len(lines) == len({*lines})
    assert {*lines} <= {*papers.wanted(paper)}


def rows(paper: str) -> list[list[str]]:
    """Return the cells of each row of a paper's table."""
    lines = (papers.FOLDER / f"{paper}.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in table]


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_each_row_has_a_verdict_and_not_run_says_what_is_not_here(paper: str) -> None:
    for row in rows(paper):
        assert len(row) == 7, row[0]
        assert re.match(r"(same|smaller|other|not run)\b", row[6]), row[0]
        lacks = re.compile(r"not run: [^;]*\b(is|are) not here")
        assert all(lacks.search(cell) for cell in row[:6] if "not run" in cell), row[0]
        assert row[6] != "not run" or row[5].startswith("not run: "), row[0]


def alternatives(word: str) -> Iterator[str]:
    """Yield what ``a-{b, c}`` stands for."""
    if found := re.search(r"\{([^{}]*)\}", word):
        for each in found[1].split(","):
            yield from alternatives(word[: found.start()] + each.strip() + word[found.end() :])
    else:
        yield word


def test_each_preset_is_named_by_a_row_a_study_a_page_or_a_test() -> None:
    files = [*papers.FOLDER.glob("*"), *(papers.ROOT / "jobs" / "atlas").glob("*.toml"), papers.ROOT / "README.md"]
    files += [*(papers.ROOT / "docs").rglob("*.md"), *(papers.ROOT / "tests").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix != ".jsonl")
    words = {word for each in re.findall(r"[a-z](?:[\w*-]|\{[\w ,-]+\})+", text) for word in alternatives(each)}
    patterns = [word for word in words if re.fullmatch(r"[\w-]+-\*", word)]
    unnamed = [
        name for name in presets() if not any(fnmatchcase(name, word) for word in (*patterns, name) if word in words)
    ]
    assert unnamed == []


def test_runs_are_those_of_the_first_seed_before_the_second(small: dict[str, Any]) -> None:
    names = [run.name for run in papers.wanted("any")]
    assert names[:3] == ["runs/a/one/3", "runs/a/two/3", "runs/b/two/3"]
    assert names[3:] == ["runs/a/one/4", "runs/a/two/4", "runs/b/two/4", "words/all/it/0"]


def test_keys_of_the_case_go_on_top_of_those_of_study_and_arm(small: dict[str, Any]) -> None:
    run = papers.Run("any", "runs", "a", "one", 3)
    assert papers.asked_of(run) == (
        "fedavg-digits",
        [],
        {"rounds": 2, "evaluate.every": 1, "clients": 6, "seed": 3},
    )


def test_a_line_has_what_was_measured_at_each_test(small: dict[str, Any], tmp_path: Path) -> None:
    line = papers.carried_out(papers.Run("any", "runs", "a", "one", 3))
    preset, overlays, settings = papers.asked_of(papers.identity(line))
    data = hpcfl.run(preset, overlays=overlays, settings=settings, out=tmp_path / "run", quiet=True).data
    assert (line["status"], line["rounds"]) == ("done", [1, 2])
    np.testing.assert_allclose(line["accuracy"], data["accuracy"], rtol=1e-4)
    np.testing.assert_allclose(line["sim_seconds"], data["sim_seconds"], rtol=1e-4)
    assert line["arrived"] == [1] * 6
    assert "distance" not in line


def test_a_command_s_last_line_is_kept(small: dict[str, Any]) -> None:
    line = papers.carried_out(papers.Run("any", "words", "all", "it", 0))
    assert (line["status"], line["values"]) == ("done", {"seed": 0})


def test_what_is_there_is_skipped(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(papers, "FOLDER", tmp_path)
    monkeypatch.setattr(papers, "PAPERS", ("any",))
    monkeypatch.setattr(papers, "carried_out", lambda run: {**run._asdict(), "status": "done", "seconds": 3600.0})
    assert papers.run(["any"], (1, 2), 1.0, ["runs"])["runs"] == 3
    assert papers.run(["any"], (0, 1), 1.0, [])["runs"] == 4
    assert papers.run(["any"], (0, 1), 1.0, [])["runs"] == 0
    assert papers.cost(["any"]) == {
        "any runs": {"runs": 6, "done": 6, "hours": 6.0},
        "any words": {"runs": 1, "done": 1, "hours": 1.0},
    }
    monkeypatch.setattr(sys, "argv", ["papers.py", "cost", "nobody"])
    with pytest.raises(SystemExit, match="2"):
        papers.main()
    assert "no paper 'nobody'; expected some of any" in capsys.readouterr().err


def test_lines_that_differ_are_told(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "FOLDER", tmp_path)
    line = papers.carried_out(papers.Run("any", "words", "all", "it", 0))
    papers.study_lines.append(tmp_path / "any.jsonl", line)
    assert papers.again(["any"], 1.0, "")["differ"] == []
    papers.study_lines.append(tmp_path / "any.jsonl", {**line, "values": {"seed": 1}})
    assert papers.again(["any"], 1.0, "")["differ"] == ["words/all/it/0: values"]


def test_what_the_page_says_of_lines(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "FOLDER", tmp_path)
    monkeypatch.setattr(papers, "PAPERS", ("any",))
    monkeypatch.setattr(papers_page, "lines", papers_page.lines.__wrapped__)
    curves = {("two", 3): [0.5, 0.7, 0.8], ("two", 4): [0.4, 0.6, None], ("one", 3): [0.1, 0.2, 0.9], ("one", 4): [0.1]}
    for (arm, seed), accuracy in curves.items():
        times = {"rounds": [2, 4, 6][: len(accuracy)], "sim_seconds": [1.0, 2.0, 4.0][: len(accuracy)]}
        line = {**papers.Run("any", "runs", "a", arm, seed)._asdict(), "accuracy": accuracy, **times, "seconds": 1800.0}
        papers.study_lines.append(tmp_path / "any.jsonl", line)
    word = {**papers.Run("any", "words", "all", "it", 0)._asdict(), "values": {"a": [{"b": 2.5}]}, "seconds": 0.0}
    papers.study_lines.append(tmp_path / "any.jsonl", word)
    one, two = ("any runs/a/one", "any runs/a/two")
    assert papers_page.ended(two, tests=2) == pytest.approx([0.75, 0.5])
    assert papers_page.ends(two, tests=2) == "0.625 ± 1.588"  # of two values: half of .25, times 12.706
    assert papers_page.differ(two, one, digits=1, scale=100) == "20.0 ± 381.2"  # -10 and 50 points
    assert papers_page.best(two, digits=1) == "0.7 ± 1.3"  # of .8 and .6: half of .2, times 12.706
    assert papers_page.reached(two, 0.6, cost=10, unit=2) == [41.0, 41.0]
    assert papers_page.time(two, 0.7) == "never"
    assert papers_page.ratio(two, two, 0.6) == "1"
    (tmp_path / "page.md").write_text("# It\n\n{{more.md}}\n{{hours()}} h\n", encoding="utf-8")
    (tmp_path / "more.md").write_text('{{value("any words/all/it", "a.0.b")}}, {{ends("any runs/b/two")}}\n')
    assert papers_page.page() == ("# It\n\n2.5, ?\n2.0 h\n", ["any runs/b/two"])
    with pytest.raises(KeyError, match="nobody"):
        papers_page.ends("any runs/a/nobody")


def test_a_run_that_is_asked_to_stop_ends_the_study(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be a line of half a run."""

    def stopped(*given: Any, **more: Any) -> None:
        raise Stopped(1, "asked")

    monkeypatch.setattr(hpcfl, "run", stopped)
    with pytest.raises(Stopped):
        papers.carried_out(papers.Run("any", "runs", "a", "one", 3))

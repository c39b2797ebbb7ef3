"""One ``--set`` or ``--with`` away: overlays are merged key by key, and what has no meaning any more is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from hpcfl import config as configs
from hpcfl.algorithms import algorithm_class
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import Config, load

SALF = {  # keys of each section that other classes have too, and keys that they have not
    "rounds": 3,
    "clients": 4,
    "algorithm": {"name": "salf", "lr": 0.2, "batch": 64, "rule": "paper", "momentum": 0.5, "persist_optimizer": True},
    "participation": {"close": "first", "first": 2, "adaptive_window": 50},
    "speed": {"model": "exponential", "rate": 2.0, "communication": 0.5},
    "data": {"name": "digits", "train_samples": 400},
    "model": {"name": "mlp", "hidden": [8]},
}
KEPT = {"lr": 0.2, "batch": 64, "momentum": 0.5, "persist_optimizer": True}
FEDAVG = '[algorithm]\nname = "fedavg"\nweights = "uniform"\n[participation]\nclose = "all"\n'
DROPPED = (
    "dropped algorithm.rule, which algorithm.name = 'fedavg' does not have; "
    "participation.first, which is for participation.close = 'first'\n"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fedavg.toml").write_text(FEDAVG)


def given(config: Config) -> dict[str, Any]:
    return json.loads(config.model_dump_json(exclude_unset=True))


def refused(*arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is kept, and what is dropped


@pytest.mark.parametrize("base", [SALF, configs.from_table(SALF)], ids=["table", "config"])
def test_keys_that_the_new_class_has_stay_and_others_go(base: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a config too only what it was given is taken over: not that SALF's other keys are as by default."""
    found = load(base, ["algorithm.name=fedavg"], "fedavg.toml", tell=True)
    assert given(found) == {
        **SALF,
        "algorithm": {**KEPT, "name": "fedavg", "weights": "uniform"},
        "participation": {"close": "all", "adaptive_window": 50},
    }
    assert capsys.readouterr().err == f"hpcfl: {DROPPED}"
    assert SALF["algorithm"]["rule"] == "paper"  # type: ignore[index]


@pytest.mark.parametrize(
    ("setting", "section", "left"),
    [
        ("algorithm.name=hf_maml", "algorithm", {"name": "hf_maml", "lr": 0.2, "batch": 64}),
        ("speed.model=none", "speed", {"model": "none", "communication": 0.5}),
        ("data.name=mnist", "data", {"name": "mnist", "train_samples": 400}),
        ("data.name=noisy_features", "data", {"name": "noisy_features"}),
        ("model.name=cnn", "model", {"name": "cnn", "hidden": [8]}),
        ("participation.close=all", "participation", {"close": "all", "adaptive_window": 50}),
        ("participation.close=first", "participation", SALF["participation"]),
        ("algorithm.name=salf", "algorithm", SALF["algorithm"]),
    ],
)
def test_each_name_by_a_setting(setting: str, section: str, left: dict[str, Any]) -> None:
    key, _, value = setting.partition("=")
    for settings in ([setting], {key: value}):
        assert given(load(SALF, settings))[section] == left


def test_a_section_that_is_set_whole_takes_nothing_over() -> None:
    found = load(SALF, {"algorithm": {"name": "fedavg", "lr": 0.1}})
    assert given(found)["algorithm"] == {"name": "fedavg", "lr": 0.1}
    assert "algorithm.rule: unknown key" in refused(SALF, {"algorithm": {"name": "fedavg", "rule": "paper"}})


def test_a_size_goes_with_the_draw_of_who_is_invited(capsys: pytest.CaptureFixture[str]) -> None:
    table = {**SALF, "participation": {"invite": "uniform", "size": 2}}
    found = load(table, ["participation.invite=all"], tell=True)
    assert found.participation.size is None
    assert capsys.readouterr().err.endswith("participation.size, which is for participation.invite = 'uniform'\n")
    found.check_values()


def test_a_deadline_goes_with_rounds_that_close_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be an upper bound beside other rules, which counts only where somebody wants it."""
    table = {**SALF, "participation": {"close": "deadline", "deadline": 0.5}}
    first = ["participation.close=first", "participation.first=2"]
    assert load(table, first, tell=True).participation.bound is None
    assert capsys.readouterr().err.endswith("participation.deadline, which is for participation.close = 'deadline'\n")
    assert load(table, [*first, "participation.deadline=0.5"]).participation.bound == 0.5
    assert load(SALF, ["participation.deadline=0.5"]).participation.bound == 0.5
    with pytest.raises(UsageError, match=r"^participation\.deadline = 0\.5 has no meaning with .* = 'all': remove it"):
        load(SALF, ["participation.deadline=0.5", "participation.close=all"]).check_values()
    bounded = {**SALF, "participation": {"close": "first", "first": 2, "deadline": 0.5}}
    load(bounded, ["participation.close=all"]).check_values()  # there is nothing left that it could bound
    quorum = ["participation.close=quorum", "participation.quorum=2"]
    assert load(bounded, quorum).participation.bound == 0.5


def test_what_one_sets_oneself_is_refused_as_ever() -> None:
    rule = "algorithm.rule: unknown key"
    assert refused(SALF, ["algorithm.name=fedavg", "algorithm.rule=paper"]).startswith(rule)
    assert refused(SALF, {"algorithm.name": "fedavg", "algorithm.rule": "paper"}).startswith(rule)
    assert refused(SALF, ["algorithm.rule=paper"], "fedavg.toml").startswith(rule)
    Path("rule.toml").write_text('[algorithm]\nrule = "paper"\n')
    for overlays in (["rule.toml", "fedavg.toml"], ["fedavg.toml", "rule.toml"]):
        assert refused(SALF, (), overlays).startswith(f"rule.toml: {rule}")
    assert refused(SALF, (), ["fedavg.toml", {"algorithm": {"rule": "paper"}}]).startswith(rule)
    kept = load(SALF, ["participation.close=all", "participation.first=2"])
    with pytest.raises(UsageError, match=r"^participation\.first = 2 has no meaning with .* = 'all': remove it"):
        kept.check_values()


def test_unknown_keys_of_a_config_are_refused_though_a_name_changes() -> None:
    """Only where the section's own class changes are its keys dropped."""
    table = {**SALF, "model": {"name": "mlp", "hiden": [8]}}
    assert refused(table, ["algorithm.name=fedavg"]) == "model.hiden: unknown key; did you mean 'hidden'?"


def test_nothing_is_said_where_nothing_is_dropped_or_nobody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    load(SALF, ["algorithm.name=fedavg"])
    load(SALF, ["algorithm.lr=0.3"], [{"model": {"hidden": [4]}}], tell=True)
    assert capsys.readouterr().err == ""


def test_classes_from_outside_are_picked_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("outside_overlay.py").write_text(
        "from hpcfl.algorithms.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    mu: float = 0.0\n"
    )
    Path("mine.toml").write_text("[algorithm]\nname = 'outside_overlay:Mine'\nmu = 0.5\n")
    found = load(SALF, (), "mine.toml", tell=True)
    assert given(found)["algorithm"] == {**{**KEPT, "name": "outside_overlay:Mine", "mu": 0.5}}
    assert "dropped algorithm.rule, which algorithm.name = 'outside_overlay:Mine' " in capsys.readouterr().err
    assert issubclass(algorithm_class("outside_overlay:Mine"), algorithm_class("fedavg"))


# ---- overlays


def test_overlays_are_merged_key_by_key_the_later_over_the_earlier_and_settings_over_all() -> None:
    Path("a.toml").write_text("rounds = 5\nseed = 1\n[algorithm]\nlr = 0.3\nbatch = 8\n[evaluate]\nevery = 2\n")
    Path("b.toml").write_text("seed = 2\n[algorithm]\nlr = 0.4\n")
    found = load(SALF, ["algorithm.batch=4"], ["a.toml", Path("b.toml"), {"evaluate": {"last": 3}}])
    algorithm = {**SALF["algorithm"], "lr": 0.4, "batch": 4}  # type: ignore[dict-item]
    changed = {"rounds": 5, "seed": 2, "algorithm": algorithm, "evaluate": {"every": 2, "last": 3}}
    assert given(found) == {**SALF, **changed}


def test_an_overlay_has_a_name_or_a_base() -> None:
    Path("more.toml").write_text("base = 'fedavg'\nseed = 7\n")
    by_name, by_file = load("salf-digits", (), "wait"), load("salf-digits", (), "more.toml")
    assert (by_name.algorithm.name, by_name.participation.close, by_name.seed) == ("fedavg", "all", 1)
    assert (by_file.algorithm.name, by_file.participation.close, by_file.seed) == ("fedavg", "all", 7)
    assert by_name.algorithm.model_dump()["lr"] == 0.2


BAD = {
    "unknown key": ("key.toml", "[algorithm]\nlrr = 1.0\n", "key.toml: algorithm.lrr: unknown key; did you mean 'lr'?"),
    "unknown section": ("key.toml", "[algorythm]\nlr = 1.0\n", "key.toml: algorythm: unknown key; did you mean 'algor"),
    "wrong value": ("key.toml", "[algorithm]\nlr = 'x'\n", "key.toml: algorithm.lr: expected number, got 'x'"),
    "no such class": ("key.toml", "[algorithm]\nname = 'fedav'\n", "key.toml: algorithm.name: no 'fedav'; did you"),
    "a value for a section": ("key.toml", "model = 3\n", "key.toml: model: expected a table, got 3"),
    "not TOML": ("key.toml", "x = \n", "key.toml: not valid TOML: "),
    "a cycle": ("key.toml", "base = 'key'\n", "key.toml: base = 'key' leads back to where it began"),
    "no such file": ("none.toml", "", "none.toml: no such file"),
    "no such name": ("srpfl-everybdy", "", "no overlay 'srpfl-everybdy'; did you mean 'srpfl-everybody'?"),
    "no such name at all": (
        "xyz",
        "",
        "no overlay 'xyz'; expected a TOML file, or one of those that hpcfl list overlays names",
    ),
    "a list with a hole": (",wait", "", "--with fedavg.toml,,wait: expected FILE[,FILE...]"),
}


@pytest.mark.parametrize("command", ["check", "run", "optimum"])
@pytest.mark.parametrize("name", BAD)
def test_bad_overlays_are_one_line(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    overlay, text, line = BAD[name]
    if text:
        Path(overlay).write_text(text)
    assert main([command, "salf-digits", "--with", f"fedavg.toml,{overlay}"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"hpcfl: {line}")
    assert not Path("runs").exists()


# ---- commands and Python


@pytest.mark.parametrize("words", [["--with", "fedavg.toml,few.toml"], ["--with", "fedavg.toml", "--with", "few.toml"]])
def test_check_takes_them_in_any_number_of_lists(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("few.toml").write_text("rounds = 4\nclients = 3\n")
    assert main(["check", "salf-digits", *words, "--set", "rounds=5"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "config        valid: fedavg, 5 rounds, 3 clients"
    dropped = "dropped algorithm.rule, algorithm.missing, which algorithm.name = 'fedavg' does not have"
    dropped += "; participation.deadline, which is for participation.close = 'deadline'"
    assert said.err == f"hpcfl: salf-digits: {dropped}\n"


@pytest.mark.parametrize("overlays", ["fedavg.toml", ["wait", {"algorithm": {"weights": "uniform"}}]])
def test_runs_from_python_take_them(overlays: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model.name": "glm", "model.link": "softmax", "evaluate.every": 3}
    run = hpcfl.run(SALF, out="out", overlays=overlays, settings=settings, quiet=True)
    found = configs.from_text(run.data.attrs["config"])
    assert (found.algorithm.name, found.participation.close, found.model.name) == ("fedavg", "all", "glm")
    assert found.algorithm.model_dump()["weights"] == "uniform"
    hidden = "; model.hidden, which model.name = 'glm' does not have\n"
    assert capsys.readouterr().err == f"hpcfl: {DROPPED[:-1]}{hidden}"

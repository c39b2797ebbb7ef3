"""What `hpcfl list` says of presets, sections and keys, and that it says it of all."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.commands import cli
from hpcfl.commands import list as catalogue
from hpcfl.config import Config, load
from hpcfl.config.presets import overlays, presets
from hpcfl.data import source_class, sources
from hpcfl.engine.job import Job
from hpcfl.engine.record import about_clients, columns
from hpcfl.models import model_class, models
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds import speed_class, speeds

SCHEMA = Config.model_json_schema()
ROW = r"^\| `(\w+)` \| ([\w, ]*) \| (\w*) \| (.*) \|$"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"
CLASSES = {
    **{("algorithm", "name", name): algorithm_class(name) for name in algorithms()},
    **{("speed", "model", name): speed_class(name) for name in speeds()},
    **{("data", "name", name): source_class(name) for name in sources()},
    **{("model", "name", name): model_class(name) for name in models()},
}
OWN = """
from pydantic import Field
from hpcfl import FedAvg

class Near(FedAvg):
    '''Models stay near the shared one.

    More of it.'''

    pull: float = Field(0.5, ge=0)
    '''Strength of the pull.'''

class Silent(FedAvg):
    weight: float = 1.0
"""


lines_of = cache(catalogue.lines)  # of a section: each class of it looks there


def keys(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("    ")]


def plain() -> list[type[ConfigBase]]:
    """Return the sections whose class nothing picks."""
    classes = [
        field.annotation for key, field in Config.model_fields.items() if key not in {key for key, _, _ in CLASSES}
    ]
    return [cls for cls in classes if isinstance(cls, type) and issubclass(cls, ConfigBase)]


def test_every_key_of_the_configs_schema_is_listed() -> None:
    whole = catalogue.lines("keys")
    for key, about in SCHEMA["properties"].items():
        lines = catalogue.lines(key)
        assert key == "data" or set(lines) <= set(whole)
        if "$ref" not in about:
            assert keys(lines) == [key]
            continue
        if key == "data":  # what there is of it, see below
            assert set(keys(whole)) > {"side", "partition"}
            continue
        assert lines[0] == f"[{key}]"
        inside = SCHEMA["$defs"][about["$ref"].rpartition("/")[2]]["properties"]
        assert set(inside) <= set(keys(lines))


@pytest.mark.parametrize(("section", "by", "name"), CLASSES, ids=lambda part: part)
def test_every_key_of_every_class_is_listed(section: str, by: str, name: str) -> None:
    lines = catalogue.lines(f"{section}.{name}")
    assert lines[0].startswith(f"  {name}: ")
    assert keys(lines) == [key for key in CLASSES[section, by, name].model_json_schema()["properties"] if key != by]
    assert set(lines) <= set(lines_of("keys"))
    assert f"'{name}'" in lines_of(f"{section}.{by}")[0]


@pytest.mark.parametrize("part", list(catalogue.parts()), ids=lambda part: part.name)
def test_every_text_is_a_sentence_that_needs_no_other(part: catalogue.Part) -> None:
    for text in (part.text, *(key.text for key in part.keys)):
        assert text.endswith((".", "…)")), text
        first = text.split()[0].strip(",")  # a symbol keeps its case
        assert not first[0].islower() or len(first) == 1 or "_" in first or not first.isascii(), text
        assert not text.startswith(("The same", "And ", "As above")), text


@pytest.mark.parametrize("cls", [*CLASSES.values(), *plain()], ids=lambda cls: cls.__name__)
def test_what_is_listed_as_default_is_what_it_may_be(cls: type[ConfigBase]) -> None:
    required = {"run": "runs/one", "file": "all.h5"}
    whole = cls.from_table({key: required[key] for key in required if key in cls.model_fields}, "it")
    assert cls.from_table(whole.model_dump(mode="json"), "it") == whole


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("rounds", ["    rounds = required (integer ≥ 1 and ≤ 2147483647)  Rounds of the whole run."]),
        ("guard.most", ["    most = 0.5 (number ≥ 0 and ≤ 1)  A round in which more"]),
        ("lane_width", ["    lane_width = 'auto' ('auto', 'node', 'all', 'two-level' or integer ≥ 1)  Wall clock: "]),
        ("batch_clients", ["    batch_clients = 'auto' ('auto', false or integer ≥ 1)  Clients per chunk"]),
        ("participation.first", ["    first = nothing (integer ≥ 1)  Visits that a round waits for"]),
        (
            "participation.deadline",
            ["    deadline = nothing (number, 'adaptive', 'planned' or [[integer, number], …])  Seconds above 0"],
        ),
        ("algorithm.salf.momentum", ["    momentum = 0.0 (number ≥ 0 and < 1)  Heavy-ball"]),
        (
            "algorithm.missing",
            ["  salf: Layer-wise", "    missing = 'exact' ('paper', 'exact', 'empirical' or 'none')  p_l"],
        ),
        ("speed.model", ["    model = 'none' ('none', 'bootstrap', 'exponential', 'groups', "]),
        ("speed.means_of", ["  groups: ", "    means_of = [0.1, 10.0] ([number > 0, …])  Mean seconds"]),
        ("speed.trace.run", ["    run = required (string)  The run folder"]),
        ("data.digits.side", ["    side = 8 (4 or 8)  Pixels per side."]),
        ("algorithm.salf.persist_optimizer", ["    persist_optimizer = false (true or false)  Keep"]),
    ],
)
def test_a_name_gives_just_its_lines(name: str, lines: list[str]) -> None:
    found = catalogue.lines(name)
    assert len(found) == len(lines)
    assert all(line.startswith(beginning) for line, beginning in zip(found, lines, strict=True)), found


def test_a_section_is_listed_with_what_it_is() -> None:
    lines = catalogue.lines("participation")
    assert lines[:2] == ["[participation]", "  Who is invited to a round, and when it closes: two independent choices."]
    assert keys(lines) == list(Participation.model_fields)
    assert catalogue.described(Participation) == lines[1:]
    assert catalogue.described(algorithm_class("salf")) == catalogue.lines("algorithm.salf")


def test_presets_and_overlays_are_listed_by_themselves() -> None:
    for kind, names in (("presets", presets()), ("overlays", overlays())):
        lines = catalogue.lines(kind)
        assert [line.split(":")[0].strip() for line in lines[1:]] == list(names)
    assert "  salf-digits: SALF on the bundled digits, " in "\n".join(catalogue.lines("presets"))


@pytest.mark.parametrize(
    ("preset", "needed"),
    [
        ("fedavg-digits", ""),
        ("combined-digits", ""),  # two domains, neither of which reads files
        ("survival", ""),
        ("table2-cnn-salf", " Needs files of mnist."),
        ("vgg-cifar10-salf", " Needs files of cifar10."),
        ("srpfl-fig7-homogeneous-sent140", " Needs files of sent140."),
        ("flic-two-digits-small", " Needs files of mnist."),
        ("local-mnist-usps", " Needs files of mnist and files of usps."),
        ("fedhenn-textcaps", " Needs textcaps.h5."),
    ],
)
def test_presets_say_which_files_they_need(preset: str, needed: str) -> None:
    assert catalogue.needs(preset) == needed


def test_presets_on_data_to_be_brought_say_so() -> None:
    lines = {name: text for name, text in catalogue.texts("presets").items() if " Needs " in text}
    words = "cifar10", "cifar100", "emnist", "femnist", "sent140", "usps", "textcaps"
    assert {name for name in presets() if name.split("-")[-1] in words or "cifar10" in name} <= {*lines}


def test_one_screen_says_what_to_begin_with_and_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert lines[0] == "start here: hpcfl run NAME"
    assert [line.split()[0] for line in lines[1:6]] == list(catalogue.FIRST)
    kinds = {"methods": algorithms(), "models": models(), "data": sources(), "speeds": speeds()}
    for kind, names in kinds.items():
        (line,) = [line for line in lines if line.startswith(f"{kind}:")]
        assert line.split(":", 1)[1].strip().split(", ") == list(names)
        found = catalogue.lines(kind)
        assert [each.split(":")[0].strip() for each in found[1:]] == list(names)
    for words in (line.split("hpcfl list ")[1].split("  ")[0] for line in lines if line.startswith("  hpcfl list ")):
        for name in words.replace(",", "").replace("|", " ").split():
            assert catalogue.lines(name)


def test_tables_have_what_is_printed() -> None:
    methods = hpcfl.list("methods")
    assert [f"  {name}: {text}" for name, text in methods["about"].items()] == catalogue.lines("methods")[1:]
    assert list(methods.index) == list(algorithms())
    table = hpcfl.list("keys")
    assert [name.rpartition(".")[2] for name in table.index] == keys(lines_of("keys"))
    assert table.index.is_unique
    assert table.loc["algorithm.salf.momentum"].tolist()[:2] == ["0.0", "number ≥ 0 and < 1"]
    assert hpcfl.list().loc["presets", "salf-digits"]["about"].startswith("SALF on the bundled digits, ")
    with pytest.raises(hpcfl.UsageError, match=r"^hpcfl\.list: no 'method'; did you mean 'methods'\?$"):
        hpcfl.list("method")


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: hpcfl ")
    assert "hpcfl run fedavg-digits" in said


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("participation.deadlin", "did you mean 'participation.deadline'?"),
        ("algorithms", "did you mean 'algorithm'?"),
        ("algorithm.sallf", "did you mean 'algorithm.salf'?"),
        ("salf", "did you mean 'algorithm.salf'?"),
        ("mising", "did you mean 'algorithm.salf.missing'?"),
        ("preset", "did you mean 'presets'?"),
        ("zzzzzzzz", "hpcfl list keys names them all"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list", name]) == 2
    assert capsys.readouterr() == ("", f"hpcfl: hpcfl list: no '{name}'; {nearest}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of one's own in it, which has two methods, one of them without a word."""
    path = tmp_path_factory.mktemp("own")
    (path / "own_keys.py").write_text(OWN, encoding="utf-8")
    return path


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    return "algorithm.own_keys:"


def test_a_preset_and_an_overlay_are_what_stands_in_their_files() -> None:
    assert catalogue.lines("salf-digits") == presets()["salf-digits"].read_text(encoding="utf-8").splitlines()
    assert catalogue.lines("wait") == overlays()["wait"].read_text(encoding="utf-8").splitlines()
    assert catalogue.lines("wait-digits")[1:] == ["base = 'salf-digits'", "with = ['wait']"]


def test_a_class_of_ones_own_is_listed(own: str) -> None:
    inherited = catalogue.lines("algorithm.fedavg")[1:]
    pull = "    pull = 0.5 (number ≥ 0)  Strength of the pull."
    assert catalogue.lines(f"{own}Near") == ["  own_keys:Near: Models stay near the shared one.", *inherited, pull]
    assert catalogue.lines(f"{own}Near.pull") == [pull]
    assert catalogue.lines(f"{own}Silent") == ["  own_keys:Silent:", *inherited, "    weight = 1.0 (number)"]
    assert not any("own_keys" in line for line in catalogue.lines("keys"))


def test_what_a_class_of_ones_own_lacks_is_refused(own: str) -> None:
    with pytest.raises(
        UsageError, match=r"no 'algorithm.own_keys:Near.pul'; did you mean 'algorithm.own_keys:Near.pull'"
    ):
        catalogue.lines(f"{own}Near.pul")
    with pytest.raises(UsageError, match=r"no 'Nearr' in .*own_keys.py; did you mean 'Near'"):
        catalogue.lines(f"{own}Nearr")


def test_a_class_of_no_section_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no section 'algoritm' of which 'mine:Own' .*; did you mean 'algorithm'\?$"):
        catalogue.lines("algoritm.mine:Own")


def test_on_a_terminal_a_text_goes_on_below_itself() -> None:
    whole = catalogue.lines("algorithm.salf")
    lines = list(catalogue.wrapped(whole, 60))
    assert max(map(len, lines)) <= 60
    assert len(lines) > 2 * len(whole)
    assert " ".join(lines).split() == " ".join(whole).split()
    assert keys([line for line in lines if not line.startswith(" " * 8)]) == keys(whole)


def test_the_page_of_keys_is_what_is_printed_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8"), "hpcfl list --markdown > docs/reference/keys.md"


def test_the_page_has_every_key_of_every_class() -> None:
    """Those that several classes have stand once, under the names of all that have them."""
    page = PAGE.read_text(encoding="utf-8")
    for section in ("algorithm", "speed", "data", "model"):
        text = page.partition(f"## [{section}]\n")[2].partition("\n## [")[0]
        several, *classes = re.split(r"\n### (?!Keys that)", text)
        own = {each.partition("\n")[0]: set(re.findall(r"^- `(\w+) = ", each, re.M)) for each in classes}
        for group in re.split(r"\n(?=[^\n]+:\n\n- )", several.partition("### Keys that several have")[2])[1:]:
            whose, keys = group.partition(":\n")[0], set(re.findall(r"^- `(\w+) = ", group, re.M))
            names = whose.removeprefix("All").removeprefix(" but ").split(", ") if whose != "All" else []
            for name in set(own) - set(names) if whose.startswith("All") else names:
                own[name] |= keys
        found = {part.choice: {key.name for key in part.keys} for part in catalogue.parts() if part.section == section}
        found.pop("")
        assert own == found


@pytest.mark.parametrize("name", ["fedbuff", "fedcompass", "adel"])
def test_a_method_that_is_a_preset_is_found_by_its_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"no '{name}'; did you mean '{name}-digits'\\?"):
        catalogue.lines(name)


BY_STEPS = '`partial = "steps"`, `work = "speed"`, or a `dispatch` that sets steps'
ARRIVAL_STEPS = '`close = "arrivals"`, and `partial = "steps"` or a `dispatch` that sets steps'
ARRIVALS = '`close = "arrivals"`'
STEPS = {"participation.partial": "steps", "participation.deadline": 1.0, "participation.close": "deadline"}
RECORDED = [
    ("salf-digits", {}, []),
    ("fedprox-digits", STEPS, [BY_STEPS]),
    ("fedbuff-digits", {}, [ARRIVALS]),
    ("dylu-digits", {}, [ARRIVALS, BY_STEPS]),
    ("fedcompass-digits", {}, [ARRIVALS, BY_STEPS, ARRIVAL_STEPS]),
    ("fedqueue-digits", {}, [ARRIVALS, BY_STEPS, ARRIVAL_STEPS, '`dispatch = "fedqueue"`']),
    ("fedlrgd-logistic", {}, ["`oracle.record = true`", "`fedlrgd`"]),
    ("flic-toy", {}, ["`flic`"]),
    ("fedrep-linear", {}, ["`linear_fedrep`"]),
]


def test_the_page_of_columns_is_what_is_printed_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "columns", "--markdown"]) == 0
    page = (PAGE.parent / "columns.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "hpcfl list columns --markdown > docs/reference/columns.md"


@pytest.mark.parametrize(("preset", "settings", "asked"), RECORDED, ids=[preset for preset, *_ in RECORDED])
def test_a_run_has_the_columns_that_the_page_says_its_keys_ask_for(
    preset: str, settings: dict[str, Any], asked: list[str]
) -> None:
    page = (PAGE.parent / "columns.md").read_text(encoding="utf-8")
    rows = {part.partition("\n")[0]: set(re.findall(ROW, part, re.M)) for part in page.split("\n## ")[1:]}
    job = Job.of(load(preset, settings), None, 1)
    own = {(each.name, ", ".join(each.dims), each.units, each.long_name) for each in columns(job)}
    assert own == rows["Always"].union(*(rows[f"With {keys}"] for keys in asked))
    facts = {(fact.name, "client", "", fact.long_name) for fact in about_clients(job.task.federation)}
    assert facts < rows["Once per client, without a round"]


def test_columns_are_listed_as_lines_too() -> None:
    listed = catalogue.lines("columns")
    assert listed[0] == "Always"
    assert "    visits (rank)  visits computed" in listed
    assert "    checkpoint_bytes (bytes)  bytes of that checkpoint; 0 where there was none" in listed

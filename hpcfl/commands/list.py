"""What there is to choose from: presets, and every key of a config as the types explain it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby, pairwise
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from hpcfl.base.config import ConfigBase, sections
from hpcfl.base.errors import UsageError, did_you_mean, toml
from hpcfl.base.lazy import pandas
from hpcfl.commands import recorded
from hpcfl.config import Config
from hpcfl.config.presets import PICKED, about, overlays, presets, read, variants
from hpcfl.data import source_class, sources

PICK = "Which one, and so which other keys there are; or ``package.module:Class``, a class of your own."
TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "string"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
KINDS = {"methods": "algorithm", "models": "model", "data": "data", "speeds": "speed"}
FILES = {"presets": "hpcfl run NAME", "overlays": "hpcfl run CONFIG --with NAME"}
NAMED = *KINDS, *FILES
"""What there is by name."""
MORE = {
    "methods|models|data|speeds": "what each of them is",
    "presets|overlays": "whole configs, and parts to put on one (--with)",
    "fedavg-digits": "what stands in a preset",
    "algorithm.salf, algorithm.lr, speed": "keys of a method, one key, a section",
    "keys": "every key",
    "columns": "every column of run.h5",
}
FIRST = "fedavg-digits", "salf-digits", "srpfl-fedrep-digits", "flic-digits", "fedlrgd-breast-cancer"
"""Presets to begin with: one of each paper, which take seconds."""
PAGE = """# The keys of a config

Made from the types by `hpcfl list --markdown`. `hpcfl list keys` prints the same; `hpcfl list algorithm.salf` or
`hpcfl list algorithm.salf.lr` prints a part of it.

Each key stands with its default, with what it may be, and with what it means. `required`: there is no default.
`nothing`: the key is not set unless you set it. In a file a section's keys stand below its `[name]`; on the command
line `--set section.key=value` sets one. A file's key `base` names a preset or another file that it changes."""


SHARED = "With the defaults of the first that has them; where another one holds, the class says so."


class Key(NamedTuple):
    """A key of the config: its default, its type or choices with their range, and what it means."""

    name: str
    default: str
    values: str
    text: str

    def line(self) -> str:
        return f"    {self.name} = {self.default} ({self.values})  {self.text}".rstrip()


class Part(NamedTuple):
    """Keys that belong together: those at the top, of a section, or of a class that picks what a section is."""

    section: str
    choice: str
    text: str
    keys: Sequence[Key]

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.name == name)

    @property
    def name(self) -> str:
        return f"{self.section}.{self.choice}" if self.choice else self.section

    @property
    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}.{key.name}".lstrip(".") for key in self.keys)]

    def head(self) -> str:
        return f"  {self.choice}: {self.text}".rstrip() if self.choice else f"  {self.text}"

    def lines(self) -> list[str]:
        title = [] if self.choice else [f"[{self.section}]" if self.section else "keys outside sections"]
        return [*title, self.head(), *(key.line() for key in self.keys)]

    def about(self, name: str) -> list[str]:
        """Return what a name asks for; ``algorithm.lr`` is the key of that name of any class."""
        if name in (self.name, self.section):
            return self.lines()
        if name in self.names:
            return [key.line() for key in self.keys if name == f"{self.name}.{key.name}".lstrip(".")]
        lines = [key.line() for key in self.keys if name == f"{self.section}.{key.name}"]
        return [self.head(), *lines] if lines else []


def texts(kind: str) -> dict[str, str]:
    """Return what each is of one kind among `NAMED`, by its name."""
    if section := KINDS.get(kind):
        return {name: _part(section, name, PICKED[section].find(name)).text for name in PICKED[section].names()}
    if kind == "presets":
        return {each: about(each) + needs(each) for each in presets()}
    return {each: about(each) for each in overlays()}


def needs(preset: str) -> str:
    """Return in words of which sources a preset reads files that others publish, or which file; "": none."""
    data, known = read(preset)["data"], {*sources()}
    keys = source_class(data["name"]).model_fields if data["name"] in known else {}
    values = {key: field.default for key, field in keys.items()} | data
    pools = [each for key, each in values.items() if key != "name" and each in known] or [data["name"]]
    files = [f"files of {each}" for each in pools if each in known and source_class(each).published]
    files += [data["file"]] if "file" in data else []
    return f" Needs {' and '.join(files)}." if files else ""


def frame(name: str = "") -> pandas.DataFrame:
    """Return what `lines` says as a table; UsageError as there."""
    if not name:
        return pandas.concat({kind: frame(kind) for kind in NAMED}, names=["kind"])
    if name in NAMED:
        return pandas.DataFrame({"about": texts(name)}).rename_axis("name")
    if name != "keys":
        raise UsageError(f"hpcfl.list: no '{name}'{did_you_mean(name, (*NAMED, 'keys'))}")
    rows = [(full, *key[1:]) for part in parts() for full, key in zip(part.names[1:], part.keys)]
    return pandas.DataFrame(rows, columns=["name", "default", "values", "about"]).set_index("name")


def lines(name: str = "") -> list[str]:
    """Return what to begin with, or what there is of one name, of a preset or an overlay what stands in its file.

    UsageError says which is nearest where there is none.
    """
    if name in NAMED:
        section = KINDS.get(name, "")
        keys = section and f"{section}.{PICKED[section].by}; hpcfl list {section}.NAME prints the keys of one"
        return [f"{name} ({keys or FILES[name]})", *(f"  {each}: {text}" for each, text in texts(name).items())]
    if name in variants():
        said = (f"{key} = {toml(value)}" for key, value in variants()[name][1].items() if key != "about")
        return [f"# {about(name)}", *said]
    if file := {**presets(), **overlays()}.get(name):
        return file.read_text(encoding="utf-8").splitlines()
    if not name:
        return _screen()
    if name == "columns":
        return [*recorded.lines()][1:]
    if name == "keys":
        return [line for part in parts() for line in ([] if part.choice or not part.section else [""]) + part.lines()]
    there = list(parts()) if ":" not in name else []
    if ":" in name:  # section.package.module:Class, or section.package.module:Class.key
        section, _, rest = name.partition(".")
        module, _, inside = rest.partition(":")
        if section not in PICKED:
            which = f"'{section}' of which '{rest}' could be a class"
            raise UsageError(f"hpcfl list: no section {which}{did_you_mean(section, PICKED)}")
        spec = f"{module}:{inside.partition('.')[0]}"
        there = [_part(section, spec, PICKED[section].find(spec))]
    found = [line for part in there for line in part.about(name)]
    if not found:
        names = [*FILES, "keys", "columns", *KINDS, *(each for part in there for each in part.names if each)]
        by_last = {each.rpartition(".")[2]: each for each in reversed(names)}
        words = [] if "." in name else get_close_matches(name, by_last, 1, 0.7)
        begins = [each for each in presets() if each.startswith(f"{name}-")]  # methods that are points on several keys
        exact = [by_last[word] for word in words if word == name]
        near = exact or begins or [by_last[word] for word in words] or get_close_matches(name, names, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else "hpcfl list keys names them all"
        raise UsageError(f"hpcfl list: no '{name}'; {hint}")
    return found


def _screen() -> list[str]:
    """Return what fits on one screen: what to run first, the names that there are, and how to see more."""
    width = max(map(len, FIRST))
    first = [f"  {each:{width}}  {about(each)}" for each in FIRST]
    names = [f"{kind + ':':9}{', '.join(PICKED[section].names())}" for kind, section in KINDS.items()]
    wide = max(map(len, MORE))
    more = [f"  hpcfl list {each:{wide}}  {text}" for each, text in MORE.items()]
    return ["start here: hpcfl run NAME", *first, "", *names, "", "more:", *more]


def wrapped(lines: Iterable[str], columns: int) -> Iterator[str]:
    """Yield lines for a terminal, where a text goes on below itself."""
    for line in lines:
        yield from textwrap.wrap(line, columns, subsequent_indent=" " * 8, break_on_hyphens=False) or [""]


def markdown(name: str = "") -> Iterator[str]:
    """Yield the page of all keys: of a section whose classes have keys in common, these once, before the classes.

    Or that of all columns, where `name` says so.
    """
    if name == "columns":
        yield from recorded.markdown()
        return
    yield PAGE
    for (section, chosen), several in groupby(parts(), lambda part: (part.section, bool(part.choice))):
        some = list(several)
        shared = _shared(some) if chosen else {}
        if shared:
            yield f"\n### Keys that several have\n\n{SHARED}"
            for having in dict.fromkeys(shared.values()):
                yield f"\n{_whose(some, having)}:\n"
                yield from (_item(some[having[0]].key(name)) for (name, _), each in shared.items() if each == having)
        for part in some:
            title = f"### {part.choice}" if chosen else f"## [{section}]" if section else "## Keys outside sections"
            yield f"\n{title}\n\n{part.text}"
            items = [item for key in part.keys if (item := _own(key, some, shared))]
            yield from ["", *items] if items else []


def _own(key: Key, parts: Sequence[Part], shared: Mapping[tuple[str, str], Sequence[int]]) -> str:
    """Return what a class has of a key beside what is said of it for several classes; "": nothing."""
    having = shared.get((key.name, key.text))
    if having is None:
        return _item(key)
    return "" if key == parts[having[0]].key(key.name) else f"- `{key.name} = {key.default}` ({key.values})"


def _item(key: Key) -> str:
    return f"- `{key.name} = {key.default}` ({key.values}): {key.text}"


def _shared(parts: Sequence[Part]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the keys, by name and text, that several parts have, and which of these do."""
    having = defaultdict[tuple[str, str], list[int]](list)
    for number, part in enumerate(parts):
        for key in part.keys:
            having[key.name, key.text].append(number)
    return {key: tuple(numbers) for key, numbers in having.items() if len(numbers) > 1}


def _whose(parts: Sequence[Part], having: Sequence[int]) -> str:
    """Return which of the parts have a key, in the fewest words."""
    names = [parts[number].choice for number in having]
    without = [part.choice for part in parts if part.choice not in names]
    if not without:
        return "All"
    return f"All but {', '.join(without)}" if len(without) < len(names) else ", ".join(names)


def described(cls: type[ConfigBase]) -> list[str]:
    """Return what a section is, after its name if it has one, and a line for each of its keys but this name."""
    name = next((field.default for key, field in cls.model_fields.items() if _picks(key, field)), "")
    part = _part("", name, cls)
    return [part.head(), *(key.line() for key in part.keys)]


def parts() -> Iterator[Part]:
    """Yield all keys in the order of the config; those of the classes in the package, of no others."""
    yield _part("", "", Config)
    for section, cls in sections(Config).items():
        if section in PICKED:
            by, default, names, find = PICKED[section]
            picks = Key(by, toml(default) if default else "required", _joined([toml(name) for name in names()]), PICK)
            yield Part(section, "", field_texts(Config)[section], [picks])
            yield from (_part(section, name, find(name)) for name in names())
        else:
            yield _part(section, "", cls)


def field_texts(cls: type[ConfigBase]) -> dict[str, str]:
    """Return each field's description or the string below it, in the class or the last base that has one, on one line.

    Read here, not by pydantic as it makes each class, which would take a fifth of the time of ``import torch``.
    """
    texts = dict.fromkeys(cls.model_fields, "")
    for each in (base for base in reversed(cls.__mro__) if issubclass(base, ConfigBase)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for field, below in pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[key] = text
    given = {key: field.description for key, field in cls.model_fields.items() if field.description}
    return {key: " ".join(text.split()) for key, text in (texts | given).items()}


@functools.cache
def _part(section: str, choice: str, cls: type[ConfigBase]) -> Part:
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())  # not what its base is
    properties = cls.model_json_schema()["properties"]
    elsewhere = sections(Config) if cls is Config else ()
    texts, keys = field_texts(cls), list[Key]()
    for key, field in cls.model_fields.items():
        if not _picks(key, field) and key not in elsewhere:
            default = "required" if field.is_required() else toml(field.get_default(call_default_factory=True))
            keys.append(Key(key, default, _joined(_values(properties[key])), texts[key]))
    return Part(section, choice, text, keys)


def _picks(key: str, field: FieldInfo) -> bool:
    """Return whether a key is the one whose value picks the class that has it."""
    return key in ("name", "model") and isinstance(field.default, str) and len(get_args(field.annotation)) < 2


def _values(schema: Mapping[str, Any]) -> list[str]:
    """Return in words what a JSON schema allows; that a key may be left out goes without saying."""
    if "enum" in schema or "const" in schema:
        return [toml(value) for value in schema.get("enum", [schema.get("const")])]
    if "anyOf" in schema:
        return [text for each in schema["anyOf"] if each.get("type") != "null" for text in _values(each)]
    if "prefixItems" in schema:
        return [f"[{', '.join(_joined(_values(item)) for item in schema['prefixItems'])}]"]
    if schema.get("type") == "array":
        return [f"[{_joined(_values(schema['items']))}, …]"]
    limits = " and ".join(f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema)
    return [f"{TYPES.get(schema.get('type', ''), 'table')} {limits}".rstrip()]


def _joined(words: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))

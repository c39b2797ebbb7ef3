"""How long the sentences of the documentation are, and whether its words are explained: a part of `make check`.

    python tests/sentences.py [--draw [SEED]] [PAGE ...]

With --draw, prints 20 sentences that are drawn by a seed, for a reader to say in words of their own. Else counts words
in sentences of running text and lists: no code, tables, headings or formulas. Exit code 1 where a page has a mean above
`MEAN`, where nine of ten sentences are not within `MOST` words, where a phrase is banned, where a word of ours is used
that docs/reference/glossary.md does not explain, or where the keys of a config are described in more than `KEYS` words.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEAN, MOST, KEYS = 18.0, 30, 7000
CODE = r"``?[^`]+``?"
BANNED = (
    "as it were", "in order to", "it should be noted", "note that", "of course", "obviously", "simply", "basically",
    "please", "leverage", "utilize", "seamless", "powerful", "cutting-edge", "state-of-the-art", "blazing",
)  # fmt: skip
OURS = (
    "chunk", "cohort", "deadline", "depth", "fate", "fragment", "lane", "leader", "newcomer", "replay", "round",
    "sealed", "staleness", "straggler", "version", "virtual client", "visit", "void", "world",
)  # fmt: skip
"""Words that mean something of their own here: who uses one has an entry of the glossary to read."""
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
KEYS_PAGE = ROOT / "docs" / "reference" / "keys.md"
FOLDERS = "tutorials", "howto", "explanation", "reference"
GENERATED = "keys.md", "columns.md"


def pages() -> list[Path]:
    """Return the pages for users."""
    found = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    found += sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    return [ROOT / "README.md", *(page for page in found if page.name not in GENERATED)]


def text(page: Path) -> str:
    """Return a page in Markdown: of a notebook, its cells of text."""
    read = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return read
    cells = json.loads(read)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(markdown: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, without code, tables, headings and what links point to."""
    bare = re.sub(r"^(```|~~~).*?^\1\s*$", "", markdown, flags=re.M | re.S)
    bare = re.sub(r"<!--.*?-->", "", bare, flags=re.S)
    bare = re.sub(r"\$\$.*?\$\$", "", bare, flags=re.S)
    bare = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", bare)
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", bare)
    bare = re.sub(r"^(#|\||    |:::).*$", "", bare, flags=re.M)
    bare = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", bare, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", bare):
        if words := " ".join(paragraph.split()):
            yield words


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page."""
    found, codes = [], re.findall(CODE, "\n\n".join(prose(markdown)))
    told = iter(codes)
    for paragraph in prose(markdown):
        whole = re.sub(CODE, "`code`", paragraph)
        whole = re.sub(r"\b(e\.g|i\.e|et al|eq|cf|vs|Fig|No)\.", r"\1", whole)
        found += [each for each in re.split(r"(?<=[.!?:])[\"”)*_]*\s+(?=[A-Z0-9*\"“(`])", whole) if each.strip()]
    return [re.sub("`code`", lambda _: next(told), each) for each in found]


def lengths(markdown: str) -> list[int]:
    """Return how many words each sentence has, ascending; code is one word, what is shorter than three is none."""
    bare = [re.sub(CODE, "code", each) for each in sentences(markdown)]
    counts = sorted(len(re.findall(r"[^\W_][\w'’.-]*", each)) for each in bare)
    return [count for count in counts if count > 2]


def explained() -> set[str]:
    """Return the words that the glossary has, in small letters."""
    if not GLOSSARY.is_file():
        return set()
    return {word.lower() for word in re.findall(r"^\*\*([^*]+)\*\*", GLOSSARY.read_text(encoding="utf-8"), re.M)}


def faults(page: Path) -> list[str]:
    """Return what is wrong with a page, a line each."""
    markdown = text(page)
    counts, whole = lengths(markdown), " ".join(prose(markdown)).lower()
    found = []
    if counts:
        mean, most = sum(counts) / len(counts), counts[int(0.9 * (len(counts) - 1))]
        if mean > MEAN or most > MOST:
            found.append(f"{len(counts)} sentences of {mean:.1f} words in the mean, nine of ten up to {most}")
    found += [f"'{phrase}' is banned" for phrase in BANNED if re.search(rf"\b{re.escape(phrase)}\b", whole)]
    known = explained()
    used = [word for word in OURS if re.search(rf"\b{word}s?\b", whole)]
    return found + [f"'{word}' is not in the glossary" for word in used if word not in known]


def described(keys: str) -> int:
    """Return how many words follow the types of keys and the headings of sections on the page of all keys."""
    return sum(len("".join(each).split()) for each in re.findall(r"^- `.*?\): (.*)$|^## .*\n\n(.*)$", keys, re.M))


def main(names: Sequence[str]) -> int:
    """Print what is wrong, and how many words and sentences there are, or some sentences."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--draw", metavar="SEED", type=int, nargs="?", const=26, help="print 20 sentences that are drawn by a seed"
    )
    parser.add_argument("pages", nargs="*", help="pages; else all that are for users")
    asked = parser.parse_args(names)
    read = [Path(name).resolve() for name in asked.pages] or pages()
    if asked.draw is not None:
        every = [(page, each) for page in read for each in sentences(text(page)) if len(each.split()) > 4]
        for number, (page, each) in enumerate(random.Random(asked.draw).sample(every, 20), 1):
            print(f"{number}. [{text(page).partition(chr(10))[0].lstrip('# ')}] {each}")
        return 0
    wrong, counts, words = 0, list[int](), 0
    for page in read:
        for fault in faults(page):
            wrong += 1
            print(f"{page.relative_to(ROOT)}: {fault}")
        counts += lengths(text(page))
        words += sum(len(paragraph.split()) for paragraph in prose(text(page)))
    counts.sort()
    mean, most = sum(counts) / len(counts), counts[int(0.9 * (len(counts) - 1))]
    lengths_told = f"{len(counts)} sentences of {mean:.1f} words in the mean, nine of ten up to {most}"
    print(f"{len(read)} pages, {words} words, {lengths_told}")
    keys = described(text(KEYS_PAGE))
    print(f"keys: {keys} words of description")
    return 1 if wrong or keys > KEYS else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The check of the documentation's sentences: what it counts, and that all pages for users are within its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import sentences


def test_code_tables_headings_and_links_are_no_words() -> None:
    markdown = "# A title\n\nOne two `a b c` four. Five [six](far/away.md)\nseven!\n\n| a | b |\n\n```sh\nnot me\n```\n"
    assert sentences.sentences(markdown) == ["One two `a b c` four.", "Five six seven!"]
    assert sentences.lengths(markdown) == [3, 4]


def test_items_of_lists_are_sentences_of_their_own() -> None:
    assert sentences.lengths("- one two three\n- four five six seven\n\n1. eight nine ten\n") == [3, 3, 4]


def test_long_sentences_banned_phrases_and_unknown_words_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The lane " + "word " * 40 + "ends. We simply go.\n", encoding="utf-8")
    assert sentences.faults(page) == [
        "2 sentences of 23.0 words in the mean, nine of ten up to 3",
        "'simply' is banned",
    ]
    page.write_text("A virtual client visits.\n", encoding="utf-8")
    assert sentences.faults(page) == []


@pytest.mark.parametrize("page", sentences.pages(), ids=lambda page: page.name)
def test_a_page_is_plain(page: Path) -> None:
    assert sentences.faults(page) == []


def test_keys_are_described_in_few_words() -> None:
    items = "- `c = 1` (integer or [integer, …]): Three four.\n- `d = 2` (nor me)\n"
    assert sentences.described(f"# T\n\nNot me.\n\n## [a]\n\nOne two.\n\n### b\n\nNot me.\n\n{items}") == 4
    assert 0 < sentences.described(sentences.text(sentences.KEYS_PAGE)) <= sentences.KEYS

"""Sentiment140 (Go et al. 2009): positive and negative tweets by their users, as sequences of GloVe vectors."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, check_within
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data.base import (
    UNSTATED,
    ClientData,
    Features,
    Federation,
    Header,
    Published,
    Source,
    check_clients,
    lengths,
)
from hpcfl.data.formats.files import folder, opened_lines

COLUMNS = "polarity, id, date, query, user, text"
TWEETS, VECTORS = "training.1600000.processed.noemoticon.csv", "glove.6B.100d.txt"
POLARITY = {"0": 0, "2": None, "4": 1}  # label of each polarity; neutral tweets are left out
Tweets = list[tuple[str, int]]  # text and label of each of a user's tweets, in order of the file


@dataclass(frozen=True, eq=False)
class Sent140Federation(Federation):
    """Tweets as rows of a table of vectors, looked up when a client is asked for."""

    vectors: Features  # [words, dim]; row 0 is zero: padding, and words that are not known
    tokens: list[Ints]  # [n_i, length] per client: rows of `vectors` for the words of its tweets
    labels: list[Ints]
    train_parts: list[Ints]  # which of a client's tweets belong to either part
    test_parts: list[Ints]

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`, features ``[n, length, dim]``."""
        train, test, tokens, labels = self.train_parts[i], self.test_parts[i], self.tokens[i], self.labels[i]
        return ClientData(self.vectors[tokens[train]], labels[train], self.vectors[tokens[test]], labels[test])


class Sent140(Source):
    """Sentiment140's CSV and a GloVe file in ``sent140/`` of the data folder; clients are the users with most tweets.

    Users of equally many tweets come in order of their names. One fifth of a user's tweets, drawn by key, is its test
    part. Labels: 0 negative, 1 positive.
    """

    name: Literal["sent140"] = "sent140"
    file: str = Field(TWEETS, min_length=1)
    """The file of the tweets, CSV."""
    glove: str = Field(VECTORS, min_length=1)
    """The file of the word vectors, of any dimension."""
    min_samples: int = Field(10, ge=1)
    """Users with fewer tweets are no clients."""
    length: int = Field(25, ge=1)
    """Words of a tweet that are used; shorter ones are padded with zeros."""
    vocabulary: int = Field(10000, ge=1)
    """So many of the clients' most frequent words are known; others are zeros."""
    mixed: bool = False
    """Deal the clients' tweets out anew, whoever wrote them: clients are alike, and have as many as before."""
    published = Published(
        (f"sent140/{TWEETS}", f"sent140/{VECTORS}"),
        (
            "http://help.sentiment140.com/for-students/ (trainingandtestdata.zip)",
            "https://nlp.stanford.edu/projects/glove/ (glove.6B.zip)",
        ),
        f"tweets: {UNSTATED}; word vectors: Public Domain Dedication and License 1.0",
    )

    def check(self, clients: int, data_dir: Path | None) -> Header:
        users, _, vectors = self._read(clients, data_dir)
        test = sum(map(_tests, users))
        return Header(None, sum(map(len, users)) - test, test, ((self.length, vectors.shape[1]),), 2)

    def number_of_clients(self, data_dir: Path | None) -> int | None:
        return len(self._users(folder(self.name, data_dir, "sent140")))

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Sent140Federation:
        """Return the clients; `seed` decides which of their tweets are for testing, and how they are mixed."""
        users, rows, vectors = self._read(clients, data_dir)
        if self.mixed:
            pool = [tweet for tweets in users for tweet in tweets]
            order = iter(keyed(seed, "mix").permutation(len(pool)).tolist())
            users = [[pool[next(order)] for _ in tweets] for tweets in users]
        orders = [keyed(seed, "split", client=i).permutation(len(tweets)) for i, tweets in enumerate(users)]
        test = [np.sort(order[: _tests(order)]) for order in orders]
        train = [np.sort(order[_tests(order) :]) for order in orders]
        shapes, tokens = [(self.length, vectors.shape[1])] * clients, list[Ints]()
        for tweets in users:
            tokens.append(np.zeros((len(tweets), self.length), dtype=np.int64))
            for sequence, (text, _) in zip(tokens[-1], tweets):
                known = [rows.get(word, 0) for word in islice(words(text), self.length)]
                sequence[: len(known)] = known
        labels = [np.array([label for _, label in tweets], dtype=np.int64) for tweets in users]
        return Sent140Federation(2, lengths(train), lengths(test), shapes, vectors, tokens, labels, train, test)

    def _read(self, clients: int, data_dir: Path | None) -> tuple[list[Tweets], dict[str, int], Features]:
        """Return the clients' tweets, the row of each known word, and the vectors."""
        home = folder(self.name, data_dir, "sent140")
        check_clients(clients)
        users = self._users(home)
        there = f", the users of at least data.min_samples = {self.min_samples} tweets in {home / self.file}"
        check_within("clients", clients, 1, len(users), there)
        counts = Counter(word for tweets in users[:clients] for text, _ in tweets for word in words(text))
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: self.vocabulary]
        glove = read_glove(home / self.glove, set(frequent))
        known = [word for word in frequent if word in glove]
        vectors = np.stack([np.zeros_like(glove[known[0]]), *(glove[word] for word in known)])
        return users[:clients], {word: row for row, word in enumerate(known, start=1)}, vectors

    def _users(self, home: Path) -> list[Tweets]:
        """Return the tweets of all users who have enough of them, those with the most first."""
        tweets: dict[str, Tweets] = {}
        with opened_lines(home / self.file, "CSV", "latin-1", "", csv.Error) as file:
            reader = csv.reader(file)
            for row in reader:
                where = f"{home / self.file}: line {reader.line_num}"
                if len(row) != 6:
                    raise UsageError(f"{where} has {len(row)} columns, expected 6 ({COLUMNS})")
                if row[0] not in POLARITY:
                    raise UsageError(f"{where}: polarity {row[0][:40]!r}, expected 0, 2 or 4")
                if (label := POLARITY[row[0]]) is not None:
                    tweets.setdefault(row[4], []).append((row[5], label))
        names = [name for name in tweets if len(tweets[name]) >= self.min_samples]
        return [tweets[name] for name in sorted(names, key=lambda name: (-len(tweets[name]), name))]


def read_glove(path: Path, words: Collection[str]) -> dict[str, Features]:
    """Return the vectors of those of `words` that a file of GloVe's has (Pennington et al. 2014), float32 ``[dim]``.

    A line is a word and its numbers, as many as in the first line. UsageError also if none of the words is there.
    """
    dim, vectors = 0, dict[str, Features]()
    # only a line feed ends a line: words may hold what Unicode counts as line ends
    with opened_lines(path, "text in UTF-8", "utf-8", "\n") as found:
        for number, line in enumerate(found, start=1):
            word, *numbers = line.rstrip(" \r\n").split(" ")
            dim = len(numbers) if number == 1 else dim
            if len(numbers) != dim:
                raise UsageError(f"{path}: line {number} has {len(numbers)} values, expected {dim} as in line 1")
            if word in words:
                try:
                    vectors[word] = np.array(numbers, dtype=np.float64).astype(np.float32)
                except ValueError:
                    vectors[word] = np.full(1, np.nan, dtype=np.float32)
                if not numbers or not np.isfinite(vectors[word]).all():
                    raise UsageError(f"{path}: line {number} ({word[:40]!r}): expected a word and finite numbers")
    if not vectors:
        raise UsageError(f"{path}: vocabulary mismatch, none of the {len(words)} words of the texts has a vector")
    return vectors


def words(text: str) -> list[str]:
    """Return the words of a text in lower case; every other sign but space counts as a word of its own."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _tests(tweets: Sized) -> int:
    """Return how many of a user's tweets are for testing."""
    return len(tweets) // 5

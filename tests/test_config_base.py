"""How keys and values of the config are refused."""

from __future__ import annotations

import pytest

from hpcfl.base.errors import UsageError, check_within, refusal


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (refusal("model.rank", "at most 6", 7, nearest=6), "model.rank: expected at most 6, got 7; did you mean 6?"),
        (refusal("data.deal", "samples", True), "data.deal: expected samples, got true"),
        (refusal("a.b", "a name", None), "a.b: expected a name, got nothing"),
        (refusal("a.b", "no 'x'", ("x", 2), nearest=["y"]), "a.b: expected no 'x', got ['x', 2]; did you mean ['y']?"),
        (
            refusal("when", "'never'", "theory", nearest="by = 1"),
            "when: expected 'never', got 'theory'; did you mean by = 1?",
        ),
    ],
)
def test_every_refusal_reads_alike(error, line):
    assert str(error) == line


@pytest.mark.parametrize(("value", "near"), [(0, 1), (9, 8)])
def test_a_number_out_of_its_range_names_the_nearest(value, near):
    with pytest.raises(UsageError, match=rf"^size: expected 1 … 8 clients, got {value}; did you mean {near}\?$"):
        check_within("size", value, 1, 8, " clients")
    check_within("size", near, 1, 8)

"""The tests that every method passes find what those get wrong who know the package from outside, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcfl.testing import test_algorithms as harness

NEWCOMERS = "helpers.newcomers."
UNEQUAL = harness.test_a_chunk_of_unequal_clients_equals_single_visits
GIVEN = harness.test_changes_nothing_that_it_is_given
SAID = harness.test_sends_and_keeps_what_it_has_said
KEPT = harness.test_keeps_nothing_outside_its_state
APART = r"'.*' (of client \d )?differs by \S+ between a chunk of clients of 1, 3, 60, 7, 300 samples and visits one by"


def drawn(generator: str) -> Callable[[str], None]:
    return lambda name: harness.test_draws_nothing_from_global_generators(name, generator)


FOUND: dict[str, tuple[Callable[[str], Any], str]] = {
    "faulty:Mixing": (UNEQUAL, APART),
    "faulty:PaddedClasses": (UNEQUAL, APART),
    "faulty:AbsentClasses": (
        harness.test_clients_without_samples_of_some_classes,
        r"\.client: sends what is not finite where clients hold one or two of 4 classes$",
    ),
    "faulty:ChangingShared": (GIVEN, r"\.client: changes '.*' that it is given in place: clone it first$"),
    "faulty:ChangingServer": (GIVEN, r"\.server: changes '.*' that it is given in place: clone it first$"),
    "faulty:ChangingInTests": (GIVEN, r"\.model: changes 'age' that it is given in place: clone it first$"),
    "faulty:Remembering": (
        KEPT,
        r": the server's '.*' differs by \S+ between two runs in one process: .* `init_client`",
    ),
    "faulty:DrawingFromTheSystem": (KEPT, r"differs by \S+ between two runs in one process: .* from hpcfl\.keyed$"),
    "faulty:DrawingFromTorch": (
        drawn("torch"),
        r"differs by \S+ with another seed of torch's global generator: .*keyed$",
    ),
    "faulty:DrawingFromNumpy": (
        drawn("numpy"),
        r"differs by \S+ with another seed of numpy's global generator: .*keyed$",
    ),
    "faulty:DrawingFromPython": (
        drawn("random"),
        r"differs by \S+ with another seed of random's global generator: .*keyed$",
    ),
    "faulty:SendingDoubles": (
        SAID,
        r"\.client: block '.*': expected torch\.float32 as in the layout, got torch\.float64$",
    ),
    "faulty:SendingSums": (
        SAID,
        r"\.client: block '.*': expected \[\d, 10, 16\] with weights \[\d\], got \[10, 16\] with ",
    ),
    "faulty:SendingMore": (SAID, r"\.client: block 'norm': expected a block of the layout$"),
    "faulty:KeepingDoubles": (
        SAID,
        r"state 'visits': expected torch\.float32 \[\d, 1\] as it began, got torch\.float64 \[\d, 1\]$",
    ),
    "faulty:ServingLess": (
        SAID,
        r"\.server: shared state 'fc1\.weight': expected torch\.float32 \[.*\] as it began, got none$",
    ),
}


@pytest.mark.parametrize("method", FOUND)
def test_a_fault_is_found(method: str) -> None:
    judge, line = FOUND[method]
    with pytest.raises(pytest.fail.Exception) as found:
        judge(NEWCOMERS + method)
    assert "\n" not in str(found.value)
    assert str(found.value).startswith(NEWCOMERS + method)
    found.match(line)


@pytest.mark.parametrize("judge", dict.fromkeys(judge for judge, _ in FOUND.values()))
def test_without_a_fault_nothing_is_found(judge: Callable[[str], Any]) -> None:
    judge(NEWCOMERS + "faulty:Sound")


@pytest.mark.parametrize("method", ["feddyn:FedDyn", "ditto:Ditto"])
@pytest.mark.parametrize("judge", [UNEQUAL, GIVEN, SAID])
def test_methods_that_know_nothing_of_rests_are_right(judge: Callable[[str], Any], method: str) -> None:
    judge(NEWCOMERS + method)

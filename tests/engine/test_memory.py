"""What a rank lets go of between the phases of a round."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from hpcfl.engine import simulated
from hpcfl.engine.simulated import Simulated
from hpcfl.sums.message import ExactSums
from hpcfl.testing.runs import play, table


@pytest.mark.mpi
def test_sums_go_before_others_come(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are larger than the model. A client's rank needs them until they are sent, and no longer."""
    made: list[weakref.ref[ExactSums]] = []
    exchange, scores = Simulated.exchange, Simulated.scores

    class Noted(ExactSums):
        def __init__(self, layout: Any, *more: Any) -> None:
            super().__init__(layout, *more)
            made.extend([weakref.ref(self)] if layout else [])

    def held() -> int:
        return sum(each() is not None for each in made)

    def exchanged(self: Simulated, *given: Any) -> Any:
        assert held() == 0
        return exchange(self, *given)

    def tested(self: Simulated, *given: Any) -> Any:
        assert held() == int(self.serves)
        return scores(self, *given)

    monkeypatch.setattr(simulated, "ExactSums", Noted)
    monkeypatch.setattr(Simulated, "exchange", exchanged)
    monkeypatch.setattr(Simulated, "scores", tested)
    play(world, table("fedavg", "mlp", True, evaluate={"every": 1}), shared_dir / "run", world.comm)
    if world.comm is not None:
        assert len(made) == 4

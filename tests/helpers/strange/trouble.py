"""SALF that fails with client 5 in round 2."""

from __future__ import annotations

from hpcfl.algorithms.salf import Salf


class Trouble(Salf):
    def client(self, task, shared, personal, visits):
        if visits.round == 2 and 5 in visits.clients:
            raise ArithmeticError("no luck")
        return (yield from super().client(task, shared, personal, visits))

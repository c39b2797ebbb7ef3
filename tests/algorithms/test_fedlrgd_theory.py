"""What Theorem 2 asks of FedLRGD (eqs. 47 and 48), as printed and by hand, and what `hpcfl check` says of it."""

from __future__ import annotations

from math import ceil, e, exp, inf, log, log2, pi, sqrt
from typing import Any

import numpy as np
import pytest

from hpcfl.commands.check import report
from hpcfl.config import from_table
from hpcfl.contrib.theory.complexity import Constants, log_holder, log_least_rank, shown

ONE = Constants(dimension=2, parameters=3, smooth=0.76, convex=0.01, bound=1.01, start=log(2))


def test_steps_as_printed() -> None:
    assert ONE.condition == pytest.approx(76)
    far = log(2) + 9 * 4.01**4 * 3 / (2 * 0.01)
    assert ONE.steps(1e-2) == ceil(log(far / 1e-2) / log(76 / 75)) == 1312
    halving = Constants(1, 2, smooth=2.0, convex=1.0, bound=0.0, start=0.0)  # κ = 2, 9 · 81 · 2 / 2 = 729
    assert halving.steps(1e-3) == ceil(log2(729 / 1e-3)) == 20


def test_ranks_as_printed() -> None:
    """Eq. 47 with d = 2, α = 1, for some η and L2; where it is no less than e √d 2^d (η + d)^d."""
    d, kappa, far = 2, 76.0, log(2) + 9 * 4.01**4 * 3 / (2 * 0.01)
    for eta, holder in ((20, 1.0), (40, 7.5), (9, 1e-30)):
        front = (holder**d * eta**d) * e ** (eta * (d + 1)) * d ** (eta / 2)
        front *= ((2 * eta + 2 * d) / (eta - 1)) ** (eta * d)
        ahead = (kappa * far / ((kappa - 1) * 1e-2)) ** (d / 2)
        least = e * sqrt(d) * 2**d * (eta + d) ** d
        wanted = max(least, (front * ahead) ** (1 / (eta - 4 * d)))
        assert exp(ONE.log_rank(1e-2, eta, log(holder))) == pytest.approx(wanted, rel=1e-9)
    assert ONE.log_rank(1e-2, 8.0, 0.0) == inf
    assert 24_000 < exp(Constants(2, 3, 0.85, 0.1, 1.1, log(2)).log_rank(1e-2, 20, 0.0)) < 26_000


def test_the_best_order_is_not_at_an_end_and_no_rank_is_below_the_least() -> None:
    for d in (1, 2, 3, 6):
        problem = Constants(d, d + 1, (d + 1) / 4 + 0.01, 0.01, 1.01, log(2))
        for epsilon in (1e-2, 1e-8):
            rank, eta = problem.best_log_rank(epsilon)
            assert rank == min(problem.log_rank(epsilon, other, log_holder(other)) for other in (eta - 1, eta, eta + 1))
            assert rank > log_least_rank(d)
    assert exp(log_least_rank(2)) == pytest.approx(e * sqrt(2) * 400)


@pytest.mark.parametrize("eta", [2, 3, 6])
def test_the_logistic_gradient_is_as_smooth_as_said(eta: int) -> None:
    """Its derivatives of order η in the data, with w = 1, from σ' = σ (1 - σ) as polynomials in σ."""
    steps = [np.polynomial.Polynomial([0.0, 1.0])]
    for _ in range(eta):
        steps.append(steps[-1].deriv() * np.polynomial.Polynomial([0.0, 1.0, -1.0]))
    z, x = np.linspace(-1, 1, 401), np.linspace(0, 1, 41)[:, None]
    s = 1 / (1 + np.exp(-z))
    assert np.abs(x * steps[eta](s) + eta * steps[eta - 1](s)).max() <= exp(log_holder(eta))
    assert exp(log_holder(2)) == pytest.approx(2 * (1 + pi) / (4 * pi))


def test_ranks_are_shown_in_digits_or_powers_of_ten() -> None:
    assert [shown(log(1234.5)), shown(log(3e12)), shown(5000.0)] == ["1,235", "1e12", "1e2171"]


# what check says


def values(**more: Any) -> dict[str, Any]:
    return {
        **{"rounds": 4, "clients": 5, "seed": 4, "participation": {"close": "all"}},
        "oracle": {"phi": 100.0},
        "algorithm": {"name": "fedlrgd", "rank": 5, "lr": 1.3, "steps": 10},
        "data": {"name": "unit_cube", "dimension": 2, "samples": 12, "server": 7, "test_samples": 0},
        "model": {"name": "glm", "link": "logistic", "ridge": 0.01},
        **more,
    }


def said(config: dict[str, Any]) -> str:
    typed = from_table(config)
    return "\n".join(report(typed, typed.check(None), None, 1))


def test_check_states_the_theory_beside_the_config() -> None:
    text = said(values())
    constants = "Theorem 2: 1/L1 = 1.316 (algorithm.lr = 1.3), μ = 0.01, κ = 76, B = 1.01, F(θ0) − F* ≤ 0.693"
    assert f"theory        {constants}\n" in text
    assert "steps         S by eq. 48: 1,312 for ε = 0.01, 2,007 for ε = 1e-06; here 30\n" in text
    assert "r by eq. 47 with α = 1: 46,671 for ε = 0.01 (η = 53), " in text
    assert "more than 1,538 for any ε and loss; here 5\n" in text
    assert "of no use, the server holding 7 samples: the rank is to be tried out\n" in text


def test_check_says_where_constants_are_not_known() -> None:
    bare = values(model={"name": "glm", "link": "logistic"})
    line = "its constants are not known: expected model.name = 'glm' with link = 'logistic' or 'softmax' and a ridge"
    assert line in said(bare)
    assert "S by eq. 48" not in said(bare)


def test_check_foretells_what_is_recorded(tmp_path: Any, solo: Any) -> None:
    from hpcfl.commands.show import summary
    from hpcfl.testing.runs import play

    cases = [values()]
    cases.append(values(algorithm={"name": "fedavg", "epochs": 0, "steps": 3, "batch": 20}))
    cases[1]["data"] = cases[1]["data"] | {"deal": True}
    foretold = [
        "Γ = r² + r (R − r) + r s + r S + φ m r = 25 + 10 + 60 + 150 + 2,500 = 2,745",
        "Γ = T (b + φ τm) = 4 (42 + 100 · 5) = 2,168",  # 14 samples at most, and so no more in a batch
    ]
    for number, (config, text) in enumerate(zip(cases, foretold)):
        assert "; not recorded, oracle.record being false\n" in said(config)
        assert f"{text}\n" in said(config)
        config["oracle"] = {"record": True, "phi": 100.0}
        run = play(solo, config, tmp_path / str(number), None)
        assert f"{summary(run)['oracle']:,.0f}" == text.rpartition(" = ")[2]

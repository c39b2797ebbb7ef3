"""FedRep for linear regression: exact heads, a gradient step on the representation (Collins et al., ICML 2021).

With ``participation.close = "first"`` and ``[doubling]`` this is Algorithm 2 of SRPFL (Tziotis et al.). A round, over
those who take part, each with m fresh samples: ``w_i = argmin ‖y_i − X_i B w‖²``,
``B_i = B − η/m · X_iᵀ (X_i B w_i − y_i) w_iᵀ``; then ``B ← Q`` of ``QR(mean B_i)``.

With ``data.name = "linear_spaces"`` this is Algorithm S3 of FLIC (Rakotomamonjy et al.): the rows of X_i are embedded
by ``W_i x + b_i`` first, which whitens features of known mean and covariance along their k leading directions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Block, Client, Header, Layout, Model, ServerState, Sums, Task, Visits
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State
from hpcfl.data.linear_federation import LinearFederation, SpacesFederation, whitening

B, HEAD, MOMENT = "representation.weight", "head.weight", "moment"  # Bᵀ [k, d], w [1, k], mean of y² x xᵀ [d, d]
WEIGHT, BIAS = "embedding.weight", "embedding.bias"  # where features are embedded in d coordinates: [d, d_i], [d]


class LinearFedRep(Algorithm):
    """FedRep for linear regression: exact heads, a gradient step on the representation."""

    name: Literal["linear_fedrep"] = "linear_fedrep"
    any_shape: ClassVar[bool] = True
    needs_all: ClassVar[str] = "computes heads and representation, and nothing else"
    fresh: ClassVar[bool] = True
    own_step: ClassVar[bool] = True
    lr: float = Field(0.1, gt=0)
    """Step size η."""
    initial: Literal["moments", "random"] = "moments"
    """``moments``: round 0 is for all clients, and B becomes the k largest eigenvectors of the mean of ``1/m Σ y² x
    xᵀ``, which needs Gaussian features. ``random``: orthonormal columns, drawn by the seed (Collins et al.) or from the
    QR decomposition of ``model.initial``."""
    metric_columns: ClassVar[dict[str, str]] = {
        "distance": "principal angle distance of the representation to the true one"
    }

    def check_model(self, model: Model, header: Header) -> None:
        if model.name != "linear" or not header.fresh:
            either = "data.name = 'linear' and model.name = 'linear'"
            other = "data.name = 'linear_spaces' and the same model with its key dimension"
            raise UsageError(f"algorithm.name = 'linear_fedrep' needs {either}, or {other}")
        if model.initial is not None and self.initial == "moments":
            beside, other = (f"algorithm.initial = '{word}'" for word in ("moments", "random"))
            raise no_meaning("model.initial", model.initial, beside, other)

    def invites_all(self, round: int) -> bool:
        return round == 0 and self.initial == "moments"

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return ((B,),)

    def layout(self, task: Task) -> Layout:
        rank, dimension = self._shape(task)
        exact = torch.float64
        moment = {MOMENT: Block((dimension, dimension), exact)} if self.initial == "moments" else {}
        return ({"loss": Block((), exact), **moment, B: Block((rank, dimension), exact)},)

    def sends(self, round: int) -> frozenset[str]:
        return frozenset({"loss", MOMENT if self.invites_all(round) else B})

    def _shape(self, task: Task) -> tuple[int, int]:
        federation: LinearFederation = task.federation  # type: ignore[assignment]
        (rank, dimension), (latent, expected) = task.initial()[B].shape, federation.truth.shape
        embedding, spaces = task.initial().get(WEIGHT), hasattr(federation, "moments")
        got = None if embedding is None else len(embedding)
        if spaces and got != latent:
            what = f"data.dimension = {latent}, to which data.name = 'linear_spaces' needs an embedding"
            raise refusal("model.dimension", what, got, latent)
        if not spaces and embedding is not None:
            what = "none, since the clients of data.name = 'linear' share their feature space"
            raise refusal("model.dimension", what, got, "none, or data.name = 'linear_spaces'")
        if rank != expected:
            raise refusal("model.rank", f"data.rank = {expected}", rank, expected)
        if federation.train_sizes.min() < rank:
            least = f"at least model.rank = {rank}, since heads are solved for"
            raise refusal("data.samples", least, int(federation.train_sizes.min()), rank)
        return rank, dimension

    def init_server(self, task: Task) -> State:
        self._shape(task)
        return {B: _orthonormal(task.initial()[B].double())}

    def init_client(self, task: Task, client: int) -> State:
        rank, dimension = self._shape(task)
        state = {HEAD: torch.zeros(1, rank, dtype=torch.float64, device=task.device)}
        if not hasattr(task.federation, "moments"):
            return state
        federation: SpacesFederation = task.federation  # type: ignore[assignment]
        weight, bias = (torch.tensor(part) for part in whitening(*federation.moments(client), dimension))
        return state | {WEIGHT: weight.to(task.device), BIAS: bias.to(task.device)}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        federation: LinearFederation = task.federation  # type: ignore[assignment]
        # copied by torch, whose memory is aligned: the last bits of matrix products may depend on that
        drawn = (torch.from_numpy(part).clone() for part in federation.drawn_by(visits.clients, visits.round))
        x, y = (on_device(part, task.device) for part in drawn)
        if WEIGHT in personal:
            x = x @ personal[WEIGHT].transpose(1, 2) + personal[BIAS].unsqueeze(1)
        weight, count = visits.ones(len(y)), y.shape[1]
        if self.invites_all(visits.round):
            scaled = x * y.unsqueeze(2)
            yield {"loss": (y.square().mean(1), weight), MOMENT: (scaled.transpose(1, 2) @ scaled / count, weight)}
            return personal
        low = x @ shared[B].T
        task.oracle_calls[visits.clients] += count
        # by QR, for full rank: the default driver's last bits depend on where its workspace lies
        head = torch.linalg.lstsq(low, y.unsqueeze(2), driver="gels").solution
        rest = low @ head - y.unsqueeze(2)
        step = head @ (rest.transpose(1, 2) @ x) * (-self.lr / count)
        yield {"loss": (rest.square().mean((1, 2)), weight), B: (step, weight)}
        return personal | {HEAD: head.transpose(1, 2)}

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        if MOMENT in sums and sums.weight(MOMENT):
            # on the host, wherever sums are: the sign of an eigenvector is the library's
            _, vectors = torch.linalg.eigh(sums.mean(MOMENT).double().cpu())
            return {B: vectors[:, -len(shared[B]) :].T.contiguous().to(task.device)}
        if not sums.weight(B):
            return shared
        return {B: _orthonormal(shared[B] + sums.mean(B).view_as(shared[B]).to(shared[B].device))}

    def metrics(self, task: Task, state: ServerState) -> dict[str, float]:
        """Return ``‖(I − B*B*ᵀ) B‖₂``; after an embedding with B* in its coordinates."""
        federation: LinearFederation = task.federation  # type: ignore[assignment]
        truth, estimate = torch.tensor(federation.target), state.shared[B].T.cpu()
        return {"distance": float(torch.linalg.matrix_norm(estimate - truth @ (truth.T @ estimate), 2))}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return {name: value.to(task.dtype) for name, value in (task.replicate(shared, visits) | personal).items()}


def _orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows that span the same space; the signs are those of a positive diagonal."""
    q, r = torch.linalg.qr(rows.T)
    signed: Tensor = q * torch.sign(torch.diagonal(r))
    return signed.T.contiguous()

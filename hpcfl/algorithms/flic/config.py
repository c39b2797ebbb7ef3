"""The keys of FLIC, and which of them go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm
from hpcfl.base.errors import UsageError

if TYPE_CHECKING:
    from hpcfl.data import Header
    from hpcfl.models import Model
    from hpcfl.schedule.participation import Participation


class FlicKeys(Algorithm):
    """Personal embeddings into a latent space with shared Gaussian anchors.

    Attributes
    ----------
    inside : {"fedrep", "fedavg-ft", "l2gd"}
        What α and β_i are above the embedding (Table 2). ``fedrep``: the hidden layers and the classifier.
        ``fedavg-ft``: all is α, and learns in the local epochs. ``l2gd``: all of α and of β_i, of which the model is
        ``ω α + (1 − ω) β_i``.
    mix : float
        ω of ``l2gd``; other methods have none.
    lr : float
        Local step size.
    optimizer : {"adam", "sgd"}
        The local optimiser; it starts anew with each phase of a visit.
    weight_decay : float
        Penalty on the weights above the embedding.
    batch : int
        Samples per local step; 0 for all that a client has.
    epochs : int
        Local epochs M of φ_i and β_i.
    shared_epochs : int
        Epochs of α after that.
    shared_from : int
        α learns from this round on.
    lambda1 : float
        λ1, the weight of the distance to the anchors.
    lambda2 : float
        λ2, the weight of the anchors' samples.
    draws : int
        Samples J of each anchor per step; 0: `batch`.
    distance : {"closed", "samples"}
        W2² to the anchor, or to as many samples of it as the batch has of the class.
    ddof : int
        Empirical covariances are divided by n − ddof.
    anchors : {"classes", "targets"}
        An anchor for each class, or ``μ_y = N(y a + (1 − y) b, I)`` for real labels.
    meta : tuple of int
        The anchor of each class, where classes share anchors; empty: each has its own.
    factors : bool
        Whether the factors L_c learn (Algorithm 1), or covariances stay `scale`² I (the experiments).
    spread : float
        Standard deviation of the coordinates of the first means.
    scale : float
        The first L_c are `scale` times I.
    anchor_lr : float
        Step size of the anchors; None: `lr`.
    anchor_loss : {"held", "means"}
        The anchors that a client holds move by λ1 and λ2 as above; or all of them by the distance with weight 1 and
        ``1/C Σ_c ℓ(c, g(v_c))``.
    weights : {"uniform", "samples"}
        ω_i of the means over clients: 1, or the number of samples.
    average : {"active", "holders"}
        An anchor is averaged over all visits that counted, or over those whose client holds its class.
    reduction : {"factor_mean", "bures"}
        ``L_c ← mean L_{i,c}`` as printed, or the Wasserstein barycenter of the clients' anchors.
    tolerance : float
        ``bures``: iterations end when the covariance moves by less, relative to its size.
    iterations : int
        ``bures``: at most so many.
    pretrain : int
        Epochs in which an embedding aligns to the first anchors, before its client's first visit.
    pretrain_batch : int
        Samples per step then.
    realign : int
        Epochs in which an embedding aligns to the anchors at the beginning of a visit, and before a test of a model
        that is not `stored`.
    evaluation : {"stored", "tuned", "head"}
        The model that a client is tested with: as it is, or after `tune_epochs` more local epochs, or after
        `tune_epochs` epochs of β_i alone and `realign`.
    tune_epochs : int
        Local epochs before the test; with `hpcfl adapt`, those of φ and β of a newcomer.
    """

    inside: Literal["fedrep", "fedavg-ft", "l2gd"] = "fedrep"
    mix: float | None = Field(None, ge=0, le=1)
    lr: float = Field(1e-3, gt=0)
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: float = Field(0.0, ge=0)
    batch: int = Field(100, ge=0)
    epochs: int = Field(10, ge=1)
    shared_epochs: int = Field(1, ge=1)
    shared_from: int = Field(0, ge=0)
    lambda1: float = Field(1e-3, ge=0)
    lambda2: float = Field(1e-3, ge=0)
    draws: int = Field(0, ge=0)
    distance: Literal["closed", "samples"] = "closed"
    ddof: Literal[0, 1] = 0
    anchors: Literal["classes", "targets"] = "classes"
    meta: tuple[int, ...] = ()
    factors: bool = False
    spread: float = Field(1.0, ge=0)
    scale: float = Field(1.0, ge=0)
    anchor_lr: float | None = Field(None, gt=0)
    anchor_loss: Literal["held", "means"] = "held"
    weights: Literal["uniform", "samples"] = "uniform"
    average: Literal["active", "holders"] = "active"
    reduction: Literal["factor_mean", "bures"] = "factor_mean"
    tolerance: float = Field(1e-9, gt=0)
    iterations: int = Field(100, ge=1)
    pretrain: int = Field(0, ge=0)
    pretrain_batch: int = Field(10, ge=0)
    realign: int = Field(0, ge=0)
    evaluation: Literal["stored", "tuned", "head"] = "stored"
    tune_epochs: int = Field(10, ge=1)

    def check(self, participation: Participation, known: bool = True) -> None:
        """Refuse keys that nothing would use."""
        if self.lambda2 and not (self.draws or self.batch):
            raise UsageError("algorithm.draws: expected at least 1 with algorithm.batch = 0, got 0; did you mean 100?")
        for idle, needed, keys in self._idle():
            for key in keys if idle else ():
                self._refuse(key, f"algorithm.{needed}")

    def _idle(self) -> list[tuple[bool, str, tuple[str, ...]]]:
        """Return whether some keys do nothing, what they would need, and which they are."""
        moving = bool(self.lambda1 or self.lambda2) or self.anchor_loss == "means"
        aligning = bool(self.lambda1 or self.pretrain or self.realign) or self.anchor_loss == "means"
        classes = ("factors", "meta", "distance", "ddof", "scale", "average", "anchor_loss")
        return [
            (self.inside != "l2gd", "inside = 'l2gd'", ("mix",)),
            (self.inside == "fedavg-ft", "inside = 'fedrep'", ("shared_epochs", "shared_from")),
            (self.anchors == "targets", "anchors = 'classes'", classes),
            (self.anchor_loss == "means", "anchor_loss = 'held'", ("factors", "meta", "average")),
            (not self.factors, "factors = true", ("reduction",)),
            (self.reduction == "factor_mean", "reduction = 'bures'", ("tolerance", "iterations")),
            (not self.pretrain, "pretrain above 0", ("pretrain_batch",)),
            (not self.lambda2, "lambda2 above 0", ("draws",)),
            (not moving, "lambda1 above 0", ("factors", "anchor_lr", "average")),
            (not aligning, "lambda1 above 0", ("distance", "ddof")),
            (not aligning and not self.lambda2, "lambda1 above 0", ("spread", "scale", "meta")),
        ]

    def _refuse(self, key: str, needed: str) -> None:
        """Raise UsageError where a key that does nothing has another value than by default."""
        value = getattr(self, key)
        if value != type(self).model_fields[key].default:
            raise UsageError(f"algorithm.{key} = {value!r} has no meaning without {needed}: remove it, or set {needed}")

    def check_model(self, model: Model, header: Header) -> None:
        """Refuse a model without a latent space, keys for what it lacks, and anchors that are not of the data."""
        if model.name != "latent":
            raise UsageError(
                f"model.name: algorithm.name = 'flic' needs an embedding, got '{model.name}'; did you mean 'latent'?"
            )
        if header.targets != (self.anchors == "targets"):
            kind, near = ("real numbers", "targets") if header.targets else ("classes", "classes")
            raise UsageError(f"algorithm.anchors: the labels are {kind}, got '{self.anchors}'; did you mean '{near}'?")
        if self.meta and (len(self.meta) != header.classes or set(self.meta) != set(range(max(self.meta) + 1))):
            raise UsageError(
                f"algorithm.meta: expected {header.classes} numbers (one per class) from 0 on without gaps, "
                f"got {list(self.meta)}"
            )
        if not getattr(model, "hidden", ()) and self.inside == "fedrep":
            for key in ("shared_epochs", "shared_from"):
                self._refuse(key, "layers in model.hidden")
        if getattr(model, "embedding", "") == "identity":
            for key in ("pretrain", "realign"):
                self._refuse(key, "model.embedding = 'dense'")

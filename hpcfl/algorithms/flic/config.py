"""The keys of FLIC, and which of them go together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Header, Model, Participation
from hpcfl.base.errors import UsageError, refusal

MEANS, FACTORS = "anchor.means", "anchor.factors"
"""Names of v ``[C, k]`` and L ``[C, k, k]`` in the shared state."""
OF_CLASSES = ("covariances", "meta", "distance", "average", "anchor_loss", "deviation")
"""Keys that mean nothing where labels are real numbers."""
MOVES = ("anchor_lr", "anchor_optimizer", "anchor_steps", "anchor_every", "anchor_persist")
"""Keys of how anchors move."""


class FlicKeys(Algorithm):
    """Personal embeddings into a latent space with shared Gaussian anchors."""

    inside: Literal["fedrep", "fedavg-ft", "l2gd"] = "fedrep"
    """What α and β_i are above the embedding (Table 2). ``fedrep``: hidden layers and classifier. ``fedavg-ft``: all is
    α, and learns in the local epochs. ``l2gd``: all of both, the model is ``ω α + (1 − ω) β_i``."""
    mix: float = Field(0.5, ge=0, le=1)
    """ω of ``l2gd``."""
    lr: float = Field(1e-3, gt=0)
    """Local step size."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The local optimiser; it starts anew with each phase of a visit."""
    weight_decay: float = Field(0.0, ge=0)
    """Penalty on the weights above the embedding."""
    batch: int = Field(100, ge=0)
    """Samples per local step; 0 for all that a client has."""
    epochs: int = Field(10, ge=1)
    """Local epochs M of φ_i and β_i; one of α follows."""
    local_step: Literal["alternating", "joint"] = "alternating"
    """How φ_i and β_i learn from a batch. ``alternating``: first φ_i takes its step, then β_i. ``joint``: one gradient
    of the loss and both its terms moves both (the authors' code)."""
    shared_from: int = Field(0, ge=0)
    """α learns from this round on."""
    shared_epoch: Literal["after", "last"] = "after"
    """α's epoch. ``after``: it follows the `epochs`. ``last``: once α learns it is the last of them (the authors'
    code)."""
    lambda1: float = Field(1e-3, ge=0)
    """λ1, the weight of the distance to the anchors."""
    lambda2: float = Field(1e-3, ge=0)
    """λ2, the weight of the anchors' samples."""
    draws: int = Field(0, ge=0)
    """Samples J of each anchor per step; 0: `batch`."""
    distance: Literal["closed", "samples"] = "closed"
    """W2² to the anchor. ``closed``: in closed form, empirical covariances divided by n. ``samples``: to as many
    samples of it as the batch has of the class, covariances divided by n − 1."""
    meta: tuple[int, ...] = ()
    """The anchor of each class, where classes share anchors; empty: each has its own."""
    covariances: Literal["fixed", "mean", "bures"] = "fixed"
    """Covariances of the anchors. ``fixed``: I (the experiments). Else factors L_c learn (Algorithm 1), from I on:
    ``mean``: ``L_c ← mean L_{i,c}`` as printed; ``bures``: the Wasserstein barycenter of the clients' anchors."""
    spread: float = Field(1.0, ge=0)
    """Standard deviation of the coordinates of the first means."""
    deviation: float = Field(1.0, gt=0)
    """Standard deviation of each anchor's coordinates: its covariance is, or begins as, its square times I."""
    anchor_lr: float | None = Field(None, gt=0)
    """Step size of the anchors. By default `lr`."""
    anchor_optimizer: Literal["adam", "sgd"] | None = None
    """The anchors' optimiser. By default `optimizer`."""
    anchor_steps: int = Field(1, ge=1)
    """Steps that the anchors take each time."""
    anchor_every: Literal["visit", "batch"] = "visit"
    """When the anchors learn. ``visit``: at its end, on all that the client has. ``batch``: after each local step, on
    its batch; all else sees them as they were served (the authors' code)."""
    anchor_persist: bool = False
    """Keep the memory of a client's ``adam`` for the anchors from visit to visit."""
    anchor_loss: Literal["held", "means"] = "held"
    """``held``: the anchors that a client holds move by `lambda1` and `lambda2`. ``means``: all move, by the distance
    with weight 1 and ``1/C Σ_c ℓ(c, g(v_c))``."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""
    average: Literal["active", "holders"] = "active"
    """Visits over which an anchor is averaged. ``active``: all that counted. ``holders``: of clients that hold its
    class."""
    tolerance: float = Field(1e-9, gt=0)
    """``bures``: iterations end when the covariance moves by less, relative to its size."""
    iterations: int = Field(100, ge=1)
    """``bures``: at most so many iterations."""
    pretrain: int = Field(0, ge=0)
    """Epochs in which an embedding aligns to the first anchors before its client's first visit, or, with `hpcfl adapt`,
    a newcomer's to the last ones."""
    pretrain_batch: int = Field(10, ge=0)
    """Samples per step of `pretrain`; 0 for all that a client has."""
    realign: int = Field(0, ge=0)
    """Epochs in which an embedding aligns to the anchors when a visit begins, and before a test unless `stored`."""
    realign_who: Literal["visited", "all"] = "visited"
    """Who aligns anew. ``visited``: who is visited. ``all``: every client after every round (the authors' code), in
    simulated time only."""
    evaluation: Literal["stored", "tuned", "head", "round"] = "stored"
    """What a client is tested with. ``stored``: its own model. ``tuned``: after `tune_epochs` more local epochs.
    ``head``: after `tune_epochs` epochs of β_i alone and `realign`. ``round``: as ``tuned``, and then `realign` (the
    authors' code)."""
    tune_epochs: int = Field(10, ge=1)
    """Local epochs before the test; with `hpcfl adapt`, those of φ and β of a newcomer."""

    def check(self, participation: Participation, known: bool = True) -> None:
        if self.lambda2 and not (self.draws or self.batch):
            raise refusal("algorithm.draws", "at least 1 with algorithm.batch = 0", 0, 100)
        if self.shared_epoch == "last" and self.epochs < 2:
            raise refusal("algorithm.epochs", "at least 2 with algorithm.shared_epoch = 'last'", self.epochs, 2)
        moving = bool(self.lambda1 or self.lambda2) or self.anchor_loss == "means"
        aligning = bool(self.lambda1 or self.pretrain or self.realign) or self.anchor_loss == "means"
        idle = [  # whether some keys do nothing, what they would need, and which they are
            (self.inside != "l2gd", "inside = 'l2gd'", ("mix",)),
            (self.inside == "fedavg-ft", "inside = 'fedrep'", ("shared_from", "shared_epoch")),
            (self.anchor_loss == "means", "anchor_loss = 'held'", ("covariances", "meta", "average")),
            (self.covariances != "bures", "covariances = 'bures'", ("tolerance", "iterations")),
            (not self.pretrain, "pretrain above 0", ("pretrain_batch",)),
            (not self.lambda2, "lambda2 above 0", ("draws",)),
            (not moving, "lambda1 above 0", ("covariances", "average", *MOVES)),
            (self.moves_by == "sgd", "anchor_optimizer = 'adam'", ("anchor_persist",)),
            (not aligning, "lambda1 above 0", ("distance",)),
            (not aligning and not self.lambda2, "lambda1 above 0", ("spread", "deviation", "meta")),
            (not self.realign, "realign above 0", ("realign_who",)),
            (not self.realign and self.evaluation == "round", "realign above 0", ("evaluation",)),
        ]
        for _, needed, keys in [row for row in idle if row[0]]:
            self._refuse(keys, f"algorithm.{needed}")

    @property
    def moves_by(self) -> Literal["adam", "sgd"]:
        """The anchors' optimiser."""
        return self.anchor_optimizer or self.optimizer

    def _refuse(self, keys: tuple[str, ...], needed: str) -> None:
        """Raise UsageError where a key that does nothing has another value than by default."""
        for key in keys:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                why = f"has no meaning without {needed}: remove it, or set {needed}"
                raise UsageError(f"algorithm.{key} = {value!r} {why}")

    def shares_any(self, model: Model) -> bool:
        return self.inside != "fedrep" or bool(getattr(model, "hidden", True))  # α is the hidden layers

    def check_model(self, model: Model, header: Header) -> None:
        if model.chain and model.name != "latent":
            raise refusal("model.name", "one with an embedding, for algorithm.name = 'flic'", model.name, "'latent'")
        if header.label_shape:
            shape = header.label_shape
            raise UsageError(f"data: algorithm.name = 'flic' needs one label per sample, got labels of shape {shape}")
        if header.targets:
            self._refuse(OF_CLASSES, "labels that are classes")
        if self.meta and (len(self.meta) != header.classes or set(self.meta) != set(range(max(self.meta) + 1))):
            wanted = f"{header.classes} numbers (one per class) from 0 on without gaps"
            raise refusal("algorithm.meta", wanted, list(self.meta))
        if not getattr(model, "hidden", ()) and self.inside == "fedrep":
            self._refuse(("shared_from", "shared_epoch"), "layers in model.hidden")
        if getattr(model, "embedding", "") == "identity":
            self._refuse(("pretrain", "realign", "local_step"), "model.embedding = 'dense'")

"""Every client for itself: what methods that share have to beat."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpcfl.algorithms.local_sgd import LocalSgd


class Local(LocalSgd):
    """Every client for itself, with a model of whatever shape: nothing but the training loss is sent."""

    any_shape: ClassVar[bool] = True
    shares_model: ClassVar[bool] = False
    sends_loss_only: ClassVar[bool] = True
    name: Literal["local"] = "local"
    evaluation: Literal["stored", "tuned"] = "stored"
    """What a client is tested with. ``stored``: its own model. ``tuned``: its own after `tune_epochs` more passes
    (FLIC), also where it never took part."""

    def personal_layers(self, layers: int) -> range:
        return range(layers)

    @property
    def adapt_epochs(self) -> int:
        return 0

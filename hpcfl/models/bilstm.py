"""Recurrent networks for sequences: bidirectional LSTM layers, then fully connected ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpcfl.base.errors import UsageError
from hpcfl.models.base import Model
from hpcfl.models.mlp import check_dropout, dense

if TYPE_CHECKING:
    from torch import nn


class BiLstm(Model):
    """SRPFL's network for Sent140 by default: two bidirectional LSTM layers of 256, then 5 units, then the classes.

    Attributes
    ----------
    layers : int
        LSTM layers; what the last one ends with in either direction goes on.
    hidden : int
        Units per layer and direction.
    dropout : float
        Chance that an output of an LSTM layer but the last is dropped while training.
    bottleneck : int
        Units of a ReLU layer before the last one; 0 for none.
    """

    name: Literal["bilstm"] = "bilstm"
    layers: int = 2
    hidden: int = 256
    dropout: float = 0.5
    bottleneck: int = 5

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse inputs that are no sequences of vectors, and sizes that cannot be."""
        if min(self.layers, self.hidden) < 1 or self.bottleneck < 0:
            raise UsageError("model: expected layers and hidden of at least 1, and bottleneck of at least 0")
        if len(shape) != 2 or min(shape) < 1:
            raise UsageError(f"model.name = 'bilstm' needs features of shape (length, dimension), got {shape}")
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        """Return lstm1 … lstmn, then fc1 and, after a bottleneck, fc2."""
        from torch import nn

        from hpcfl.models.modules import lstm
        from hpcfl.models.modules.layers import Dropout

        stages, inputs = [], shape[1]
        for number in range(1, self.layers + 1):
            modules: list[nn.Module] = [lstm.BiLstm(inputs, self.hidden)]
            if number == self.layers:
                modules.append(lstm.Ends())
            elif self.dropout:
                modules.append(Dropout(self.dropout))
            stages.append((f"lstm{number}", nn.Sequential(*modules)))
            inputs = 2 * self.hidden
        return stages + dense([inputs, *([self.bottleneck] if self.bottleneck else []), classes], 0.0)

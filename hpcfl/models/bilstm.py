"""Recurrent networks for sequences: bidirectional LSTM layers, then fully connected ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.models import Chance, Model, Width
from hpcfl.models.mlp import dense
from hpcfl.models.modules import custom


class BiLstm(Model):
    """SRPFL's network for Sent140 by default: two bidirectional LSTM layers of 256, then 5 units, then the classes."""

    name: Literal["bilstm"] = "bilstm"
    layers: Width = 2
    """LSTM layers."""
    hidden: Width = 256
    """Units per layer and direction."""
    dropout: Chance = 0.5
    """Chance that an output of an LSTM layer but the last is dropped while training."""
    bottleneck: int = Field(5, ge=0)
    """Units of a ReLU layer before the last one; 0 for none."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        if len(shape) != 2 or min(shape) < 1:
            raise UsageError(f"model.name = 'bilstm' needs features of shape (length, dimension), got {shape}")

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        layers, inputs = [], shape[1]
        for number in range(1, self.layers + 1):
            modules: list[torch.nn.Module] = [custom.BiLstm(inputs, self.hidden)]
            if number == self.layers:
                modules.append(custom.Ends())
            elif self.dropout:
                modules.append(torch.nn.Dropout(self.dropout))
            layers.append((f"lstm{number}", torch.nn.Sequential(*modules)))
            inputs = 2 * self.hidden
        return layers + dense([inputs, *([self.bottleneck] if self.bottleneck else []), classes], 0.0)

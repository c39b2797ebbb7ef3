"""A GPT: a decoder-only transformer that predicts the next token at every place of a text.

A. Vaswani et al.: Attention Is All You Need, NeurIPS 2017; A. Radford et al.: Language Models are Unsupervised
Multitask Learners, 2019 (GPT-2: normalisation before each part, one matrix for reading and writing tokens).
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention to the tokens so far, then a network of each token by itself; the input goes around both."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.chance = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):  # [texts, length, width]
        x = x + self.dropout(self.mix(self.attention(self.norm1(x))))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)), approximate="tanh")))

    def attention(self, x):
        # [texts, heads, length, width / heads] each
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attend(x).chunk(3, 2))
        dropout = self.chance if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return seen.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Of texts of tokens, integers below `classes`, ``shape = [length]``; it gives ``[texts, length, classes]``.

    Parameters
    ----------
    layers, heads, width : int
        12, 12 and 768 are the smallest GPT-2's.
    dropout : float
        Chance that a number is dropped, of the sum of embeddings, of attention, and of what each part adds.
    """

    def __init__(self, shape, classes, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(classes, width), nn.Embedding(shape[0], width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.tokens.weight
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                adds = name.endswith((".mix", ".narrow"))  # 2 · layers such sums follow one another
                nn.init.normal_(part.weight, std=0.02 / sqrt(2 * layers) if adds else 0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        x = self.dropout(self.tokens(x) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

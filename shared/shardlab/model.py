"""A small GPT, the model of all labs: embedding, transformer blocks, a linear head over the characters of the text.

The architecture is GPT-2's with the layer norm first (Radford et al. 2019, section 2.3), without dropout by default, so
that two runs on the same data can be compared to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .text import VOCABULARY


@dataclass(frozen=True)
class Size:
    """What makes a GPT large or small. width must be a multiple of heads. context: the longest passage, in tokens."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32
    vocabulary: int = VOCABULARY
    dropout: float = 0.0
    tied: bool = False  # the head uses the embedding's matrix


SMALL = Size()  # the course's model: 110,592 parameters
TEN_MILLION = Size(layers=8, width=320, heads=8, context=64)


class Block(nn.Module):
    """Attention, then a two-layer network, each added to its input. (batch, time, width) in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.attention_norm = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._dropped(self.attention_out(self._attend(self.attention_norm(hidden))))
        return hidden + self._dropped(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden)))))

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        split = self.queries_keys_values(hidden).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens (batch, time), int64, to logits (batch, time, vocabulary) in the weights' dtype. time <= size.context."""

    def __init__(self, size: Size = SMALL) -> None:
        """Weights are drawn from torch's global generator: `torch.manual_seed` first makes them the same each time."""
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self._draw_weights()
        if size.tied:
            self.head.weight = self.embedding.weight

    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The layers whose result is added up along the blocks start smaller (GPT-2, section 2.3).
                added_up = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.size.layers) ** 0.5 if added_up else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    @property
    def parameter_count(self) -> int:
        """psi: the elements of all parameters; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def write(self, prompt: torch.Tensor, length: int, seed: int = 0) -> torch.Tensor:
        """Continues a passage by `length` tokens, each drawn from the model's own probabilities. 1-D int64 in and out.

        The prompt, at least one token, is part of what is returned. The draws are made on the CPU by a generator of
        their own.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[None, -self.size.context :])[0, -1].float().cpu()
            drawn = torch.multinomial(logits.softmax(0), 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, drawn])
        return tokens


def loss_function(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of all tokens, in nats, float32: logits (batch, time, vocabulary), targets (batch, time).

    It is computed in float32 whatever the logits' dtype, as mixed-precision training does (mixed precision, section 3).
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

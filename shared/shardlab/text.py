"""A small public-domain text, as numbers, and batches of it: the same ones for every lab, rank and machine.

The text is *Alice's Adventures in Wonderland* (Lewis Carroll, 1865), see `data/README.md`. A token is one character.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from .errors import UsageError

FILE = Path(__file__).parent / "data" / "alice.txt"


@cache
def text() -> str:
    """The whole text: 142,489 characters."""
    return FILE.read_text(encoding="utf-8")


@cache
def alphabet() -> str:
    """The different characters of the text, sorted; a token is a place in it."""
    return "".join(sorted(set(text())))


VOCABULARY = 66  # different characters in the text: the model's number of tokens


@cache
def _places() -> dict[str, int]:
    return {character: place for place, character in enumerate(alphabet())}


def encode(characters: str) -> torch.Tensor:
    """Tokens of some characters: int64, one per character. UsageError for a character that the text does not have."""
    places = _places()
    unknown = sorted(set(characters) - set(places))
    if unknown:
        raise UsageError(f"the text has no character {unknown[0]!r}; it has these: {alphabet()!r}")
    return torch.tensor([places[character] for character in characters], dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """The characters of some tokens, whatever their shape: the inverse of `encode`."""
    known = alphabet()
    return "".join(known[token] for token in tokens.reshape(-1).tolist())


@cache
def _tokens() -> torch.Tensor:
    return encode(text())


def batch(step: int, size: int, context: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one training step, both int64 of shape (size, context), on the CPU.

    Each row is a passage from a random place of the text; its targets are the same passage one character further on.
    The same (step, size, context, seed) gives the same batch in every process, and no other random numbers are touched.
    """
    if size < 0 or context < 1 or context >= len(_tokens()):
        raise UsageError(f"a batch of {size} passages of {context} characters cannot be made from the text")
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = _tokens()
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    places = starts[:, None] + torch.arange(context)
    return tokens[places], tokens[places + 1]

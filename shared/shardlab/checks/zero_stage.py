"""Labs 06 to 08: what each stage of ZeRO may hold and may send, as numbers.

psi: elements of the model, all of them trained, with 16-bit weights. Source of the formulas: ZeRO, Rajbhandari et al.
2020 (arXiv 1910.02054), section 5 and figure 1 for what is held, section 7 for what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..theory import MIXED_PRECISION_ADAM, SHARDED_STATES

WEIGHT, GRADIENT, OPTIMIZER = MIXED_PRECISION_ADAM.weight, MIXED_PRECISION_ADAM.gradient, MIXED_PRECISION_ADAM.optimizer


@dataclass(frozen=True)
class Stage:
    """strategy: its name in `theory`. passes: how many times (N-1)/N psi elements a rank sends in a step; most: how
    many it may send at most. formula: of the bytes held, in words.
    hides: whether reductions must overlap with backward, or may be waited for at once."""

    exercise: str
    strategy: str
    formula: str
    passes: int
    most: int
    hides: bool

    def splits(self, kind: str) -> bool:
        """Whether the stage splits "parameters", "gradients" or "optimizer" over the ranks."""
        return kind in SHARDED_STATES[self.strategy]

    @property
    def kinds(self) -> str:
        """ "weights 2 psi, gradients 2 psi/N, optimizer 12 psi/N" """
        sizes = (("weights", "parameters", WEIGHT), ("gradients", "gradients", GRADIENT))
        both = [f"{word} {size} psi{'/N' * self.splits(kind)}" for word, kind, size in sizes]
        return ", ".join([*both, f"optimizer {OPTIMIZER} psi/N"])

    def whole(self) -> int:
        """Bytes per element that every rank holds."""
        kinds = {"parameters": WEIGHT, "gradients": GRADIENT, "optimizer": OPTIMIZER}
        return sum(size for kind, size in kinds.items() if not self.splits(kind))

    def split(self) -> int:
        """Bytes per element that a rank holds of the elements that it owns."""
        return WEIGHT + GRADIENT + OPTIMIZER - self.whole()

    def held(self, psi: float, world_size: int) -> float:
        """Bytes of one rank."""
        return psi * (self.whole() + self.split() / world_size)


ZERO1 = Stage("06.Zero1", "zero1", "4 psi + 12 psi/N", passes=2, most=3, hides=True)
ZERO2 = Stage("07.Zero2", "zero2", "2 psi + 14 psi/N", passes=2, most=2, hides=True)
ZERO3 = Stage("08.Zero3", "zero3", "16 psi/N", passes=3, most=3, hides=False)

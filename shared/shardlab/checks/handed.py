"""A tensor that was handed in to a solution: whether it still is what it was, and stands for the same memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .notes import Finding

IN_PLACE = "in place: write into the tensor that was handed in (a += b, a.copy_(b)); a = a + b makes a new tensor"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Handed:
    """A tensor that was handed in, and `memory`: the memory that it stood for then, which other views see too."""

    tensor: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Handed:
        # detach() is another view of the same memory: `tensor.data = x` leaves it where it is.
        return cls(tensor, tensor.detach())

    def reshaped(self, name: str) -> Finding | None:
        """When the tensor has another shape or type now."""
        before, now = self.memory, self.tensor.detach()
        if now.dtype != before.dtype:
            return Finding(f"{name} is {dtype_name(now.dtype)} now", f"{dtype_name(before.dtype)}, as handed in")
        if now.shape != before.shape:
            return Finding(f"{name} has the shape {tuple(now.shape)} now", f"{tuple(before.shape)}, as handed in")
        return None

    def moved(self, name: str) -> Finding | None:
        """When the tensor stands for other memory now."""
        before, now = self.memory, self.tensor.detach()
        if before.numel() and now.data_ptr() != before.data_ptr():
            return Finding(
                f"{name} stands for other memory now (its .data was replaced); the memory handed in has not changed"
                " with it",
                "the result in the memory that was handed in, where other views of it see it",
                "copy_() into the tensor instead of giving it a new storage",
            )
        return None


def changed_outside(what: str) -> Finding:
    """When elements around a view have been changed."""
    return Finding(
        f"elements of the storage outside {what} have been changed",
        "only what was handed in changes: a tensor can be a view into a larger one",
        "the storage behind a view belongs to others too",
    )

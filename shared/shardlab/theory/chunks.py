"""How n elements are split over N ranks. Three splits are in use; they agree when N divides n."""

from __future__ import annotations

from shardlab.theory.arguments import one_of, ranks, whole

SPLITS = ("balanced", "ceil", "padded")


def padded_size(size: float, world_size: int) -> int:
    """The smallest multiple of N that holds `size` elements: at most N-1 more.

    Source: FSDP section 3.2.1 (padding of a FlatParameter is at most F-1, F = ranks that share it).
    """
    n, count = whole("size", size), ranks(world_size)
    return -(-n // count) * count


def chunk_sizes(size: float, world_size: int, split: str = "balanced") -> list[int]:
    """Elements of each of the N chunks of `size` elements, in rank order.

    - "balanced": sizes differ by at most one, the larger first, and sum to n (as torch.tensor_split)
    - "ceil": ceil(n/N) each until nothing is left, so the last ones can be short or empty, and sum to n (as
      torch.chunk, which leaves the empty ones out, and FSDP2)
    - "padded": ceil(n/N) each, the sum is padded_size(n, N) (FSDP section 3.2.1)
    """
    n, count = whole("size", size), ranks(world_size)
    one_of("split", split, SPLITS)
    if split == "balanced":
        base, extra = divmod(n, count)
        return [base + (rank < extra) for rank in range(count)]
    chunk = padded_size(n, count) // count
    if split == "padded":
        return [chunk] * count
    return [max(0, min(chunk, n - rank * chunk)) for rank in range(count)]

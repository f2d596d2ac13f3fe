"""Shard maps made by hand, without ranks: for tests of pictures."""

from __future__ import annotations

from shardlab.records import MemorySample
from shardlab.shard_map import Column, Holding, MapFrame, ShardMap
from shardlab.theory import model_state_bytes

KINDS = ("weights", "gradients", "master", "first_moment", "second_moment")
BYTES = {"weights": 2, "gradients": 2, "master": 4, "first_moment": 4, "second_moment": 4}
PART = {"weights": "parameters", "gradients": "gradients"}


def holding(held, flying=()):
    """held: {kind: ranges}."""
    sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for kind, ranges in held.items():
        sizes[PART.get(kind, "optimizer")] += BYTES[kind] * sum(b - a for a, b in ranges)
    live = sum(sizes.values()) + 1000  # activations and the like
    return Holding({k: r for k, r in held.items() if r}, dict(flying), MemorySample(0.0, live, **sizes))


def zero2(ranks=4, layers=4, size=40, frees=True, owned=True, title="a step"):
    """A step of ZeRO-2: a bucket a layer, in flight during the next layer's backward, then freed but for a chunk.

    frees=False: the buckets stay. owned=False: everybody holds all of the optimizer state. size: elements of a layer,
    a multiple of the ranks.
    """
    psi, chunk = layers * size, size // ranks
    own = [tuple((i * size + r * chunk, i * size + (r + 1) * chunk) for i in range(layers)) for r in range(ranks)]
    frames = []

    def frame(kind, label="", ends=False, bucket=None, buckets=(), on=None):
        states = []
        for rank in range(ranks):
            mine = own[rank] if owned else ((0, psi),)
            gradients = set(own[rank]) | {(i * size, (i + 1) * size) for i in buckets}
            flying = {"gradients": ((bucket * size, (bucket + 1) * size),)} if bucket is not None else {}
            held = {"weights": ((0, psi),), "gradients": joined(gradients)} | dict.fromkeys(KINDS[2:], mine)
            states.append(holding(held, flying))
        frames.append(MapFrame(kind, label, ends, tuple(range(ranks)) if on is None else on, tuple(states)))

    frame("start")
    for layer in range(layers):
        frame("forward", f"blocks.{layer}")
    kept = []
    for layer in reversed(range(layers)):
        before = layer + 1 if layer + 1 < layers else None
        alive = [*([] if frees else kept), *([] if before is None else [before])]
        frame("backward", f"blocks.{layer}", bucket=before, buckets=alive)
        kept.append(layer)
        alive = [layer] if frees else kept
        frame("gradient", f"blocks.{layer}.weight", buckets=alive)
        frame("call", "reduce-scatter of 80 B", bucket=layer, buckets=alive)
    frame("waiting", "reduce_scatter", bucket=0, buckets=[0] if frees else kept, on=(0,))
    frame("end", buckets=[] if frees else kept)
    owners = [(start, stop, rank) for rank in range(ranks) for start, stop in own[rank]]
    return ShardMap(
        tuple(Column(f"blocks.{i}.weight", i * size, (i + 1) * size) for i in range(layers)),
        tuple(frames),
        tuple(sorted(owners)) if owned else ((0, psi, None),),
        "zero2",
        model_state_bytes("zero2", psi, ranks),
        title,
    )


def joined(ranges):
    merged = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)

"""Hand-made runs and timelines, for tests of arithmetic and of pictures."""

from __future__ import annotations

from shardlab.records import Call, GradientReady, Run, Span
from shardlab.timeline import Timeline, timeline_of

SIZES = {"embedding": 100, "blocks.0": 400, "blocks.1": 400, "head": 100}  # elements of each layer's one parameter


def call(rank, index, issued, link=None, numel=100, op="all_reduce", completed=None, dtype="float32"):
    """link: (began, ended)"""
    began, ended = link or (None, None)
    sent = 4.0 * numel
    return Call(
        rank, index, op, None, numel, dtype, sent, sent, issued, completed, None, (0, 1), "", sent, began, ended
    )


def run_of(spans, calls, gradients=()):
    """A run from one list per rank of (kind, label, began, ended[, thread[, call]]) and of calls."""
    ranks = [[Span(rank, *span) for span in row] for rank, row in enumerate(spans)]
    gradients = [list(row) for row in gradients] or [[] for _ in spans]
    return Run(len(spans), "cpu", "gloo", 1.0, [None] * len(spans), list(calls), [], [], ranks, gradients)


def simulated(world_size: int = 2, layers: int = 4, how: str = "async", bucket: int = 1, slow: float = 0.1) -> Timeline:
    """A step of `layers` layers of 1 ms forward and 2 ms backward, whose reductions take 1.5 ms a bucket each.

    how: "async", or "blocking": each reduction stops backward. Rank r is r * slow ms late.
    """
    ms = 1e-3
    all_spans, all_calls, all_gradients = [], [], []
    for rank in range(world_size):
        time, free = rank * slow * ms, 0.0
        spans, calls, gradients = [], [], []
        for layer in range(layers):
            spans.append(("forward", f"blocks.{layer}", time, time + ms))
            time += ms
        for layer in reversed(range(layers)):
            began = time
            time += 2 * ms
            gradients.append(GradientReady(rank, f"blocks.{layer}.weight", layer, 100, "float32", time))
            if (layers - layer) % bucket == 0 or layer == 0:
                size = 100 * ((layers - layer - 1) % bucket + 1)
                start = max(time + 0.01 * ms, free)
                free = start + 1.5 * ms
                number = len(calls)
                calls.append(call(rank, number, time + 0.005 * ms, (start, free), size, completed=free))
                if how == "blocking":
                    spans.append(("waiting", "all_reduce", time + 0.005 * ms, free, 0, number))
                    time = free
            spans.append(("backward", f"blocks.{layer}", began, time + 0.006 * ms))
            time += 0.006 * ms
        if how == "async":
            spans.append(("waiting", "all_reduce", time, free, 0, len(calls) - 1))
        all_spans.append(spans)
        all_calls.append(calls)
        all_gradients.append(gradients)
    title = f"{how}, {world_size} ranks, {layers} layers"
    return timeline_of(run_of(all_spans, all_calls, all_gradients), title=title)


def checkpointed() -> Timeline:
    """One rank: two steps of a span "step", within which the backward of a layer repeats its forward."""
    spans = []
    for start in (0.0, 0.010):
        spans += [
            ("forward", "data", start - 0.001, start),  # another of this colour, that nothing encloses
            ("other", "the whole step", start, start + 0.009),
            ("forward", "blocks.0", start + 0.001, start + 0.003),
            ("backward", "blocks.0", start + 0.004, start + 0.008),
            ("recompute", "blocks.0", start + 0.004, start + 0.006),
        ]
    return timeline_of(run_of([spans], [[]]), title="checkpointed")

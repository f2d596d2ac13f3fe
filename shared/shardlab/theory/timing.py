"""The alpha-beta model: a message of b bytes takes alpha + beta b seconds, and steps of an algorithm add up.

alpha is the latency of a message in seconds, beta the time of a byte in seconds (1/beta is the bandwidth in bytes per
second). All links work at once, a rank sends and receives at once, adding numbers costs nothing.
Source: Thakur, Rabenseifner & Gropp 2005, section 3 (cost model).
"""

from __future__ import annotations

import math

from shardlab.errors import UsageError
from shardlab.theory.arguments import one_of, ranks, real
from shardlab.theory.baselines import tree_rounds
from shardlab.theory.collectives import OPERATIONS


def message_time(nbytes: float, alpha: float, beta: float) -> float:
    """Seconds of one message: alpha + beta b."""
    return real("alpha", alpha) + real("beta", beta) * real("nbytes", nbytes)


def ring_phase_time(nbytes: float, world_size: int, alpha: float, beta: float) -> float:
    """Seconds of a ring reduce-scatter, or of a ring all-gather, of n bytes: (N-1) (alpha + beta n/N)."""
    count = ranks(world_size)
    return (count - 1) * message_time(real("nbytes", nbytes) / count, alpha, beta)


def ring_all_reduce_time(nbytes: float, world_size: int, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of n bytes: 2(N-1) (alpha + beta n/N)."""
    return 2 * ring_phase_time(nbytes, world_size, alpha, beta)


def naive_all_reduce_time(
    nbytes: float, world_size: int, alpha: float, beta: float, overlap_latency: bool = False
) -> float:
    """Seconds of reducing n bytes to one rank and sending the sum from there.

    One message after the other: 2(N-1) (alpha + beta n). With `overlap_latency` the root posts all N-1 messages of a
    phase at once, and only its link is shared: 2 (alpha + (N-1) beta n).
    """
    others = ranks(world_size) - 1
    if not overlap_latency:
        return 2 * others * message_time(nbytes, alpha, beta)
    return 2 * message_time(others * real("nbytes", nbytes), alpha, beta) if others else 0.0


def tree_all_reduce_time(nbytes: float, world_size: int, alpha: float, beta: float) -> float:
    """Seconds of a binomial-tree reduce and a binomial-tree broadcast of n bytes: 2 ceil(log2 N) (alpha + beta n)."""
    return 2 * tree_rounds(world_size) * message_time(nbytes, alpha, beta)


def _crossover(more_messages: float, fewer_bytes: float, alpha: float, beta: float) -> float:
    """Size n at which `more_messages` alpha = `fewer_bytes` beta n."""
    latency, per_byte = more_messages * real("alpha", alpha), fewer_bytes * real("beta", beta)
    if latency == 0:
        return 0.0
    return latency / per_byte if per_byte > 0 else math.inf


def ring_tree_crossover_bytes(world_size: int, alpha: float, beta: float) -> float:
    """Size in bytes above which a ring all-reduce beats a tree; 0: always (N = 2, 3), infinity: never (beta = 0).

    With L = ceil(log2 N): (N-1-L) alpha / ((L - (N-1)/N) beta). Below it the ring's many messages cost more than they
    save.
    """
    count = ranks(world_size)
    rounds = tree_rounds(count)
    return _crossover(count - 1 - rounds, rounds - (count - 1) / count, alpha, beta)


def ring_naive_crossover_bytes(world_size: int, alpha: float, beta: float) -> float:
    """Size in bytes above which a ring all-reduce beats the naive one with overlapping latencies; 0: always (N = 2).

    (N-2) alpha / ((N-1)**2/N beta). Against the naive way that sends one message after the other there is no crossover:
    both have 2(N-1) messages and the ring's are N times smaller.
    """
    count = ranks(world_size)
    if count == 1:
        return 0.0
    return _crossover(count - 2, (count - 1) ** 2 / count, alpha, beta)


def collective_time(op: str, nbytes: float, world_size: int, alpha: float, beta: float) -> float:
    """Seconds of one operation by the algorithm whose bytes `collective_cost` counts (n as there).

    all_reduce: a ring, 2(N-1) (alpha + beta n/N). reduce_scatter, all_gather, all_to_all, gather, scatter: N-1 messages
    one after the other, (N-1) (alpha + beta n/N). broadcast, reduce: a chain in many small pieces, of which the last
    has N-1 links to go, (N-1) alpha + beta n. send, recv: alpha + beta n. barrier: ceil(log2 N) alpha.
    """
    one_of("op", op, OPERATIONS)
    count = ranks(world_size)
    if op in ("send", "recv"):
        return message_time(nbytes, alpha, beta)
    if op == "barrier":
        return tree_rounds(count) * message_time(0, alpha, beta)
    if op == "all_reduce":
        return ring_all_reduce_time(nbytes, count, alpha, beta)
    if op in ("broadcast", "reduce"):
        return (count - 1) * message_time(0, alpha, beta) + (message_time(nbytes, 0, beta) if count > 1 else 0.0)
    return ring_phase_time(nbytes, count, alpha, beta)


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Bytes per second, as the caller sees it: n / t. Source: nccl-tests, "Algorithm bandwidth"."""
    return real("nbytes", nbytes) / real("seconds", seconds, above_zero=True)


def bus_bandwidth_factor(op: str, world_size: int) -> float:
    """Bytes that the busiest link carries per byte of n (n as in `collective_cost`).

    2(N-1)/N for all_reduce; (N-1)/N for reduce_scatter, all_gather, all_to_all, gather and scatter; 1 for broadcast,
    reduce, send and recv. Source: nccl-tests, "Summary" (gather and scatter: its code, src/gather.cu, src/scatter.cu).
    """
    one_of("op", op, OPERATIONS)
    count = ranks(world_size)
    if op == "barrier":
        raise UsageError("op 'barrier' moves no data, so it has no bandwidth")
    if op == "all_reduce":
        return 2 * (count - 1) / count
    return 1.0 if op in ("broadcast", "reduce", "send", "recv") else (count - 1) / count


def bus_bandwidth(op: str, nbytes: float, seconds: float, world_size: int) -> float:
    """Bytes per second over the busiest link: algorithm bandwidth times `bus_bandwidth_factor`.

    Comparable with the hardware's peak whatever N is. Source: nccl-tests, "Bus bandwidth".
    """
    return algorithm_bandwidth(nbytes, seconds) * bus_bandwidth_factor(op, world_size)

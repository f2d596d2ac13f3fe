"""Times, bandwidths and the fit against clocks and synthetic measurements; texts and errors for people."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardlab import theory
from shardlab.errors import UsageError

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")

worlds = st.integers(1, 12)
latencies = st.floats(1e-7, 1e-2)
byte_times = st.floats(1e-12, 1e-6)


# Time


@given(n=st.integers(0, 10**9), world=worlds, alpha=latencies, beta=byte_times)
def test_times_against_a_clock(n, world, alpha, beta):
    clock = 0.0
    for _ in range(theory.ring_messages("all_reduce", world)):
        clock += alpha + beta * (n / world)
    assert theory.ring_all_reduce_time(n, world, alpha, beta) == pytest.approx(clock)
    assert theory.ring_phase_time(n, world, alpha, beta) == pytest.approx(clock / 2)
    naive = sum(alpha + beta * n for _ in range(2 * theory.naive_all_reduce_messages(world)))
    assert theory.naive_all_reduce_time(n, world, alpha, beta) == pytest.approx(naive)
    assert theory.ring_all_reduce_time(n, world, alpha, beta) <= naive * (1 + 1e-9)
    one_phase = alpha + beta * n * (world - 1) if world > 1 else 0
    assert theory.naive_all_reduce_time(n, world, alpha, beta, overlap_latency=True) == pytest.approx(2 * one_phase)
    assert theory.message_time(n, alpha, beta) == alpha + beta * n


@given(world=st.integers(2, 64), alpha=latencies, beta=byte_times)
def test_crossovers(world, alpha, beta):
    def naive(n):
        return theory.naive_all_reduce_time(n, world, alpha, beta, overlap_latency=True)

    def tree(n):
        return theory.tree_all_reduce_time(n, world, alpha, beta)

    def ring(n):
        return theory.ring_all_reduce_time(n, world, alpha, beta)

    for other, crossover in [(naive, theory.ring_naive_crossover_bytes), (tree, theory.ring_tree_crossover_bytes)]:
        size = crossover(world, alpha, beta)
        assert ring(size) == pytest.approx(other(size))
        assert ring(2 * size + 1) < other(2 * size + 1)
        if size > 0:
            assert ring(size / 2) > other(size / 2)
            assert crossover(world, alpha, 0) == math.inf
    assert tree(0) == pytest.approx(2 * alpha * math.ceil(math.log2(world)))


@given(n=st.integers(1, 10**9), world=st.integers(2, 64), beta=byte_times, op=st.sampled_from(theory.RING_OPERATIONS))
def test_bus_bandwidth_of_a_ring_is_the_bandwidth_of_its_links(n, world, beta, op):
    time = theory.ring_all_reduce_time if op == "all_reduce" else theory.ring_phase_time
    seconds = time(n, world, 0, beta)
    assert theory.bus_bandwidth(op, n, seconds, world) == pytest.approx(1 / beta)
    assert theory.algorithm_bandwidth(n, seconds) == n / seconds


def test_bus_bandwidth_factors_of_nccl_tests():
    assert [theory.bus_bandwidth_factor(op, 4) for op in theory.OPERATIONS if op != "barrier"] == [
        *(1.5, 0.75, 0.75, 1, 1, 0.75, 0.75, 0.75, 1, 1)
    ]
    for op in ("all_reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "broadcast", "reduce"):
        busiest = max(max(theory.collective_cost(op, 840, 7, rank)) for rank in range(7))
        assert theory.bus_bandwidth_factor(op, 7) * 840 == pytest.approx(busiest)


def measured(alpha, beta, noise=lambda i: 1.0):
    """Times of rings of 2..5 ranks and 1 kB..16 MB."""
    cases = [(2 * (world - 1), n / world) for world in (2, 3, 4, 5) for n in (1e3, 3e4, 1e6, 16e6)]
    return [(steps, size, steps * (alpha + beta * size) * noise(i)) for i, (steps, size) in enumerate(cases)]


@given(alpha=latencies, beta=byte_times)
def test_fit_finds_what_made_the_times(alpha, beta):
    assume(beta * 16e6 / alpha > 1e-4 and beta * 500 / alpha < 1e4)  # else one of the two is lost in rounding
    assert theory.fit_alpha_beta(measured(alpha, beta)) == pytest.approx((alpha, beta), rel=1e-4)


@given(factors=st.lists(st.floats(0.3, 3), min_size=16, max_size=16), alpha=st.just(0.0) | latencies, beta=byte_times)
def test_fit_of_noisy_times_cannot_be_bettered(factors, alpha, beta):
    points = measured(alpha, beta, lambda i: factors[i])
    fit = theory.fit_alpha_beta(points)

    def error(a, b):
        return sum(((steps * (a + b * size) - seconds) / seconds) ** 2 for steps, size, seconds in points)

    assert min(fit) >= 0
    for a in (0, 0.99 * fit.alpha, fit.alpha, 1.01 * fit.alpha, fit.alpha + beta * 10):
        for b in (0, 0.99 * fit.beta, fit.beta, 1.01 * fit.beta, fit.beta + 0.01 * beta):
            assert error(*fit) <= error(a, b) * (1 + 1e-9)


def test_fit_is_never_negative():
    # Grows faster than its size: alpha = 0, and beta is the minimum of (1e4 beta - 1)**2 + (1e3 beta - 1)**2.
    assert theory.fit_alpha_beta([(1, 10, 1e-3), (1, 1000, 1.0)]) == pytest.approx((0, 1.1e4 / 1.01e8), abs=0)
    # Shrinks with its size: beta = 0, and alpha is the minimum of (alpha - 1)**2 + (2 alpha - 1)**2.
    assert theory.fit_alpha_beta([(1, 10, 1.0), (1, 1000, 0.5)]) == pytest.approx((0.6, 0), abs=0)


# People


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *[(0, "0 B"), (12, "12 B"), (999, "999 B"), (2.5, "2.50 B"), (1000, "1.00 kB"), (1234567, "1.23 MB")],
        *[(9996, "10.0 kB"), (999_600, "1.00 MB"), (31.40625e9, "31.4 GB"), (120e9, "120 GB"), (2e18, "2000 PB")],
    ],
)
def test_format_bytes(nbytes, text):
    assert theory.format_bytes(nbytes) == text


def test_format_seconds():
    texts = [theory.format_seconds(t) for t in (0, 3e-9, 1.2e-4, 0.0255, 0.9999, 90)]
    assert texts == ["0 s", "3.00 ns", "120 us", "25.5 ms", "1.00 s", "90.0 s"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.model_state_bytes("zero4", 10, 2), "zero1, zero2, zero3; got 'zero4'. Did you mean"),
        (lambda: theory.model_state_bytes("dp", 10, 2), "strategy must be one of"),
        (lambda: theory.model_state_bytes("ddp", 10.5, 2), "parameters must be a whole number, at least 0; got 10.5"),
        (lambda: theory.model_state_bytes("ddp", math.nan, 2), "parameters must be a whole number"),
        (lambda: theory.model_state_bytes("ddp", 10, 0), "world_size must be a whole number, at least 1; got 0"),
        (lambda: theory.StateBytes(weight=-2, gradient=2), "weight must be a whole number"),
        (lambda: theory.chunk_sizes(10, "4"), "world_size must be a whole number, at least 1; got '4'"),
        (lambda: theory.chunk_sizes(-1, 4), "size must be a whole number, at least 0; got -1"),
        (lambda: theory.chunk_sizes(10, True), "world_size must be a whole number"),
        (lambda: theory.chunk_sizes(10, 4, "even"), "split must be one of"),
        (lambda: theory.collective_cost("allreduce", 8, 2), "Did you mean 'all_reduce'?"),
        (lambda: theory.collective_cost(["all_reduce"], 8, 2), "op must be one of"),
        (lambda: theory.collective_cost("reduce", 8, 2, rank=2), "rank must be less than world_size=2; got 2"),
        (lambda: theory.collective_cost("reduce", 8, 2, root=-1), "root must be a whole number"),
        (lambda: theory.ring_volume("all_reduce", [], 0), "one size per rank"),
        (lambda: theory.ring_volume("all_reduce", [1, 0.5], 0), "every chunk size must be"),
        (lambda: theory.ring_volume("broadcast", [1], 0), "op must be one of"),
        (lambda: theory.step_volume("zero", 8, 2), "strategy must be one of"),
        (lambda: theory.message_time(8, -1.0, 0), "alpha must be a finite number, 0 or greater; got -1.0"),
        (lambda: theory.message_time(8, "fast", 0), "alpha must be a number"),
        (lambda: theory.algorithm_bandwidth(8, 0), "seconds must be a finite number, greater than 0; got 0"),
        (lambda: theory.bus_bandwidth("barrier", 8, 1, 2), "barrier"),
        (lambda: theory.format_bytes(-1), "nbytes must be"),
        (lambda: theory.fit_alpha_beta([]), "two or more sizes"),
        (lambda: theory.fit_alpha_beta([(2, 0, 1.0), (4, 0, 2.0)]), "two or more sizes"),
        (lambda: theory.fit_alpha_beta([(2, 100, 1.0), (4, 100, 2.5)]), "clearly different sizes; got [100.0]"),
        (lambda: theory.fit_alpha_beta([(2, 100, 1.0), (2, 200, 0)]), "seconds must be"),
        (lambda: theory.fit_alpha_beta([(2, 100)]), "points must be a list"),
    ],
)
def test_bad_input_is_one_clear_line(call, words):
    with pytest.raises(UsageError) as raised:
        call()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_theory_is_the_ground_floor():
    allowed = set(sys.stdlib_module_names) | {"shardlab.errors", "shardlab.theory"}
    for file in Path(theory.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert {name, name.split(".")[0], ".".join(name.split(".")[:2])} & allowed, (
                    f"{file.name} imports {name}"
                )


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        ("all_reduce", 6 * (1 + 2 * 25)),
        ("reduce_scatter", 3 * (1 + 2 * 25)),
        ("all_gather", 3 * (1 + 2 * 25)),
        ("all_to_all", 3 * (1 + 2 * 25)),
        ("broadcast", 3 * 1 + 2 * 100),
        ("reduce", 3 * 1 + 2 * 100),
        ("send", 1 + 2 * 100),
        ("barrier", 2 * 1),
    ],
)
def test_time_of_one_operation(op, seconds):
    assert theory.collective_time(op, 100, 4, 1, 2) == seconds


def test_alone_only_messages_take_time():
    assert all(theory.collective_time(op, 100, 1, 1, 2) == 0 for op in theory.OPERATIONS if op not in ("send", "recv"))

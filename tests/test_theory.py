"""The formulas against things that don't contain them: simulated rings, counted messages, searched states, published
numbers."""

from __future__ import annotations

import math
from collections import deque
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardlab import theory

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")

sizes = st.integers(0, 5000)
worlds = st.integers(1, 12)


# Model states


@pytest.mark.parametrize(
    ("strategy", "formula", "published"),
    [
        ("ddp", lambda psi, n: 16 * psi, "120.0"),
        ("zero1", lambda psi, n: 4 * psi + 12 * psi / n, "31.4"),
        ("zero2", lambda psi, n: 2 * psi + 14 * psi / n, "16.6"),
        ("zero3", lambda psi, n: 16 * psi / n, "1.9"),
    ],
)
def test_model_states_of_the_zero_paper(strategy, formula, published):
    assert f"{theory.model_state_bytes(strategy, 7.5e9, 64) / 1e9:.1f}" == published
    for psi, n in [(7.5e9, 64), (1000, 3), (0, 5), (1, 1)]:
        assert theory.model_state_bytes(strategy, psi, n) == pytest.approx(formula(psi, n))


@given(
    strategy=st.sampled_from(sorted(theory.SHARDED_STATES)),
    psi=sizes,
    n=worlds,
    widths=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    split=st.sampled_from(theory.SPLITS),
)
def test_every_rank_exactly_adds_up_to_the_whole(strategy, psi, n, widths, split):
    state = theory.StateBytes(*widths)
    weight, gradient, *optimizer = widths
    held = [theory.rank_model_states(strategy, psi, n, rank, state, split) for rank in range(n)]
    # What the ranks hold together: each state once if it is split (padded to a multiple of N), N times if it is not.
    stored = next(size for size in range(psi, psi + n) if size % n == 0) if split == "padded" else psi
    copies = {"ddp": "NNN", "zero1": "NN1", "zero2": "N11", "zero3": "111"}[strategy]
    expected = [
        width * (n * psi if times == "N" else stored)
        for width, times in zip([weight, gradient, sum(optimizer)], copies, strict=True)
    ]
    assert [sum(getattr(h, kind) for h in held) for kind in ("parameters", "gradients", "optimizer")] == expected
    assert all(isinstance(h.total, int) for h in held)
    if split == "padded":
        assert len(set(held)) == 1
    if psi % n == 0:
        assert all(h.total == theory.model_state_bytes(strategy, psi, n, state) for h in held)


def test_data_parallel_keeps_optimizer_state_on_device_0_only():
    assert theory.rank_model_states("dp", 100, 4, 0) == theory.ModelStates(200, 200, 1200)
    assert theory.rank_model_states("dp", 100, 4, 3) == theory.ModelStates(200, 200, 0)
    assert (theory.MIXED_PRECISION_ADAM.optimizer, theory.MIXED_PRECISION_ADAM.total) == (12, 16)
    assert (theory.FP32_ADAM.total, theory.FP32_SGD.total) == (16, 8)


@given(n=sizes, world=worlds)
def test_splits(n, world):
    dealt = [0] * world  # like cards, one element at a time
    for element in range(n):
        dealt[element % world] += 1
    assert theory.chunk_sizes(n, world) == dealt
    ceil, left = [], n
    for _ in range(world):
        ceil.append(min(left, math.ceil(n / world)))
        left -= ceil[-1]
    assert theory.chunk_sizes(n, world, "ceil") == ceil
    padded = theory.chunk_sizes(n, world, "padded")
    assert len(padded) == world and len(set(padded)) == 1
    assert sum(padded) == theory.padded_size(n, world) and 0 <= sum(padded) - n < world


# Collectives


@given(op=st.sampled_from(theory.OPERATIONS), n=sizes, world=worlds, data=st.data())
def test_what_is_sent_is_received(op, n, world, data):
    assume(op not in ("send", "recv"))
    root = data.draw(st.integers(0, world - 1))
    costs = [theory.collective_cost(op, n, world, rank, root) for rank in range(world)]
    assert sum(c.sent for c in costs) == pytest.approx(sum(c.received for c in costs))
    assert min(min(c) for c in costs) >= 0
    if world == 1:
        assert costs == [(0, 0)]
    if op in ("broadcast", "reduce"):
        assert sum(c.sent for c in costs) == (world - 1) * n
        assert max(max(c) for c in costs) == (n if world > 1 else 0)


def count_messages(world, messages):
    """(sent, received) per rank of a list of (source, destination, size)."""
    sent, received = [0] * world, [0] * world
    for source, destination, size in messages:
        sent[source] += size
        received[destination] += size
    return list(zip(sent, received, strict=True))


@given(shard=st.integers(0, 500), world=worlds, data=st.data())
def test_collectives_against_counted_messages(shard, world, data):
    root = data.draw(st.integers(0, world - 1))
    n = shard * world
    chain = [(root + hop) % world for hop in range(world)]
    links = list(zip(chain, chain[1:], strict=False))
    others = [rank for rank in range(world) if rank != root]
    by_hand = {
        "all_gather": [(a, b, shard) for a, b in permutations(range(world), 2)],
        "reduce_scatter": [(a, b, shard) for a, b in permutations(range(world), 2)],
        "all_to_all": [(a, b, shard) for a, b in permutations(range(world), 2)],
        "all_reduce": 2 * [(a, b, shard) for a, b in permutations(range(world), 2)],
        "broadcast": [(a, b, n) for a, b in links],
        "reduce": [(b, a, n) for a, b in links],
        "gather": [(rank, root, shard) for rank in others],
        "scatter": [(root, rank, shard) for rank in others],
        "barrier": [],
    }
    assert set(by_hand) | {"send", "recv"} == set(theory.OPERATIONS)
    for op, messages in by_hand.items():
        costs = [theory.collective_cost(op, n, world, rank, root) for rank in range(world)]
        assert costs == count_messages(world, messages), op
    assert theory.collective_cost("send", n, world) == (n, 0)
    assert theory.collective_cost("recv", n, world) == (0, n)


# The ring


def simulate_ring(chunk_elements):
    """Runs the ring on real lists of numbers, message by message; returns each phase's messages (source, chunk, size).

    Fails unless chunk r is summed on rank r after the first phase, and all of it everywhere after the second.
    """
    world = len(chunk_elements)
    start = [[[10**rank + c] * chunk_elements[c] for c in range(world)] for rank in range(world)]
    total = [[sum(start[rank][c][i] for rank in range(world)) for i in range(chunk_elements[c])] for c in range(world)]
    held = [[list(chunk) for chunk in chunks] for chunks in start]
    outgoing, phases = [(rank - 1) % world for rank in range(world)], []
    for phase in ("reduce-scatter", "all-gather"):
        messages = []
        for _ in range(world - 1):
            in_flight = [(rank, outgoing[rank], list(held[rank][outgoing[rank]])) for rank in range(world)]
            for source, c, payload in in_flight:
                destination = (source + 1) % world
                mine = held[destination][c]
                added = [a + b for a, b in zip(mine, payload, strict=True)]
                held[destination][c] = added if phase == "reduce-scatter" else payload
                outgoing[destination] = c  # what came in goes out in the next step
                messages.append((source, c, len(payload)))
        if phase == "reduce-scatter":
            assert [held[rank][rank] for rank in range(world)] == total
            outgoing = list(range(world))
        phases.append(messages)
    assert all(chunks == total for chunks in held)
    return phases


@settings(max_examples=60)
@given(elements=st.lists(st.integers(0, 6), min_size=1, max_size=9), width=st.sampled_from([1, 2, 4, 8]))
def test_ring_against_simulation(elements, width):
    world = len(elements)
    phases = simulate_ring(elements)
    for op, messages in [
        ("reduce_scatter", phases[0]),
        ("all_gather", phases[1]),
        ("all_reduce", phases[0] + phases[1]),
    ]:
        counted = count_messages(world, [(a, (a + 1) % world, size * width) for a, _, size in messages])
        for rank in range(world):
            sent = [c for source, c, _ in messages if source == rank]
            received = [c for source, c, _ in messages if (source + 1) % world == rank]
            assert theory.ring_sent_chunks(op, world, rank) == sent
            assert theory.ring_received_chunks(op, world, rank) == received
            assert theory.ring_messages(op, world) == len(sent)
            assert theory.ring_volume(op, [e * width for e in elements], rank) == counted[rank]


@settings(max_examples=60)
@given(n=st.integers(0, 60), world=worlds, split=st.sampled_from(theory.SPLITS))
def test_ring_all_reduce_of_a_tensor(n, world, split):
    chunks = theory.chunk_sizes(n, world, split)
    assert theory.ring_chunk_bytes(n, 4, world, split) == [4 * c for c in chunks]
    messages = [(a, (a + 1) % world, 4 * size) for phase in simulate_ring(chunks) for a, _, size in phase]
    volumes = [theory.ring_all_reduce_bytes(n, 4, world, rank, split) for rank in range(world)]
    assert volumes == count_messages(world, messages)
    if split != "padded":
        assert sum(v.sent for v in volumes) == theory.all_reduce_total_lower_bound(4 * n, world)
    assert max(v.sent for v in volumes) >= theory.all_reduce_lower_bound(4 * n, world)
    if n % world == 0:
        assert all(v == theory.collective_cost("all_reduce", 4 * n, world) for v in volumes)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_no_all_reduce_needs_fewer_messages(world):
    """Searches all ways to send one number around: a rank has heard of a set of ranks, a message merges two sets."""
    start, done = tuple(1 << rank for rank in range(world)), ((1 << world) - 1,) * world
    fewest, queue = {start: 0}, deque([start])
    while done not in fewest:
        state = queue.popleft()
        for source, destination in permutations(range(world), 2):
            after = list(state)
            after[destination] |= state[source]
            if tuple(after) not in fewest:
                fewest[tuple(after)] = fewest[state] + 1
                queue.append(tuple(after))
    assert fewest[done] == theory.all_reduce_total_lower_bound(1, world)


@given(n=sizes, world=worlds, data=st.data())
def test_naive_all_reduce_against_counted_messages(n, world, data):
    root = data.draw(st.integers(0, world - 1))
    others = [rank for rank in range(world) if rank != root]
    messages = [(rank, root, n) for rank in others] + [(root, rank, n) for rank in others]
    counted = count_messages(world, messages)
    assert [theory.naive_all_reduce_volume(n, world, rank, root) for rank in range(world)] == counted
    number = [sum(source == rank for source, _, _ in messages) for rank in range(world)]
    assert [theory.naive_all_reduce_messages(world, rank, root) for rank in range(world)] == number
    assert max(sent for sent, _ in counted) >= theory.all_reduce_lower_bound(n, world)


@given(world=st.integers(1, 5000))
def test_tree_rounds_against_doubling(world):
    reached, rounds = 1, 0
    while reached < world:
        reached, rounds = 2 * reached, rounds + 1
    assert theory.tree_rounds(world) == rounds


# Strategies


@given(psi=sizes, n=worlds)
def test_step_volumes_of_the_design_table(psi, n):
    once = psi * (n - 1) / n
    for strategy, times in [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("zero1_all_reduce", 3)]:
        exact = [theory.ring_step_volume(strategy, psi, n, rank) for rank in range(n)]
        assert theory.step_volume(strategy, psi, n) == pytest.approx((times * once, times * once))
        assert sum(v.sent for v in exact) == sum(v.received for v in exact) == times * psi * (n - 1)
        assert max(v.sent for v in exact) - times * once <= times
    assert theory.step_volume("dp", psi, n, 0) == ((n - 1) * psi, (n - 1) * psi)
    for device in range(1, n):
        assert theory.step_volume("dp", psi, n, device) == (psi, psi)

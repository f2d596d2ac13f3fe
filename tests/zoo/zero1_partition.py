"""Lab 06: partitions of parameters over ranks, right and wrong."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from shardlab.pieces import Piece
from zoo import right, wrong

PARTITION = "06.partition"


def cut(sizes, world_size, chunk=None):
    """All end to end, cut every `chunk` elements."""
    chunk = chunk or -(-sum(sizes) // world_size)
    pieces = [[] for _ in range(world_size)]
    begin = 0
    for index, size in enumerate(sizes):
        for rank in range(world_size):
            first, last = max(begin, rank * chunk), min(begin + size, (rank + 1) * chunk)
            if first < last:
                pieces[rank].append((index, first - begin, last - begin))
        begin += size
    return pieces


@right(PARTITION)
def end_to_end(sizes, world_size):
    """Intervals that overlap."""
    return cut(sizes, world_size)


@right(PARTITION)
def sizes_that_differ_by_one(sizes, world_size):
    """Cut as tensor_split does: the first ranks get one element more."""
    total = sum(sizes)
    shares = [total // world_size + (rank < total % world_size) for rank in range(world_size)]
    cuts = [0, *accumulate(shares)]
    starts = [0, *accumulate(sizes)]
    pieces = []
    for low, high in zip(cuts, cuts[1:], strict=False):
        mine, at = [], low
        while at < high:
            index = bisect_right(starts, at) - 1
            stop = min(high, starts[index + 1])
            mine.append((index, at - starts[index], stop - starts[index]))
            at = stop
        pieces.append(mine)
    return pieces


@right(PARTITION)
def backwards(sizes, world_size):
    """From the last parameter to the first, and the last rank first."""
    there = cut(list(reversed(sizes)), world_size)
    last = len(sizes) - 1
    mirrored = [
        [(last - index, sizes[last - index] - stop, sizes[last - index] - start) for index, start, stop in mine]
        for mine in there
    ]
    return mirrored[::-1]


@right(PARTITION)
def largest_first(sizes, world_size):
    """Greedy: the largest to whoever has least, cut where a rank is full."""
    most = -(-sum(sizes) // world_size)
    held = [0] * world_size
    pieces = [[] for _ in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        start = 0
        while start < sizes[index]:
            rank = held.index(min(held))
            stop = min(sizes[index], start + most - held[rank])
            pieces[rank].append((index, start, stop))
            held[rank] += stop - start
            start = stop
    return pieces


@right(PARTITION)
def a_slice_of_each(sizes, world_size):
    """Every rank gets a slice of every parameter; what is left over goes round."""
    pieces = [[] for _ in range(world_size)]
    turn = 0
    for index, size in enumerate(sizes):
        share = [size // world_size] * world_size
        for _ in range(size % world_size):
            share[turn % world_size] += 1
            turn += 1
        start = 0
        for rank, count in enumerate(share):
            if count:
                pieces[rank].append((index, start, start + count))
            start += count
    return pieces


@right(PARTITION)
def pieces_in_tuples(sizes, world_size):
    """Tuples of Pieces."""
    return tuple(tuple(Piece(*piece) for piece in mine) for mine in cut(sizes, world_size))


@right(PARTITION)
def element_by_element(sizes, world_size):
    """Pieces of a single element each, dealt in turn."""
    elements = [(index, at, at + 1) for index, size in enumerate(sizes) for at in range(size)]
    return [elements[rank::world_size] for rank in range(world_size)]


@wrong(PARTITION, reason="values", says=r"belongs to nobody")
def rounds_down(sizes, world_size):
    """Chunks of total // N: the last elements belong to nobody."""
    return cut(sizes, world_size, max(1, sum(sizes) // world_size))


@wrong(PARTITION, reason="values", says=r"at most ceil")
def the_rest_to_the_last(sizes, world_size):
    """Rounds down, and the last rank takes all that is left."""
    pieces = cut(sizes, world_size, max(1, sum(sizes) // world_size))
    owned = {(index, at) for mine in pieces for index, start, stop in mine for at in range(start, stop)}
    for index, size in enumerate(sizes):
        lost = [at for at in range(size) if (index, at) not in owned]
        if lost:
            pieces[-1].append((index, lost[0], size))
    return pieces


@wrong(PARTITION, reason="values", says=r"at most ceil")
def always_one_more(sizes, world_size):
    """total // N + 1, also where N divides the total."""
    return cut(sizes, world_size, sum(sizes) // world_size + 1)


@wrong(PARTITION, reason="values", says=r"at most ceil")
def whole_parameters_in_turn(sizes, world_size):
    """Parameter i to rank i % N."""
    return [
        [(index, 0, sizes[index]) for index in range(rank, len(sizes), world_size) if sizes[index]]
        for rank in range(world_size)
    ]


@wrong(PARTITION, reason="values", says=r"at most ceil")
def whole_parameters_greedy(sizes, world_size):
    """As torch's ZeroRedundancyOptimizer: balanced up to the largest parameter."""
    held, pieces = [0] * world_size, [[] for _ in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index]:
            rank = held.index(min(held))
            pieces[rank].append((index, 0, sizes[index]))
            held[rank] += sizes[index]
    return pieces


@wrong(PARTITION, reason="values", says=r"at most ceil|empty piece|belongs to nobody")
def each_parameter_rounded_up(sizes, world_size):
    """ceil(size / N) of each parameter: the first ranks get more and more."""
    pieces = [[] for _ in range(world_size)]
    for index, size in enumerate(sizes):
        chunk = -(-size // world_size)
        for rank in range(world_size):
            start, stop = min(size, rank * chunk), min(size, (rank + 1) * chunk)
            if start < stop:
                pieces[rank].append((index, start, stop))
    return pieces


@wrong(PARTITION, reason="values", says=r"empty piece")
def empty_pieces(sizes, world_size):
    """Keeps pieces of nothing."""
    chunk = -(-sum(sizes) // world_size)
    pieces, begin = [[] for _ in range(world_size)], 0
    for index, size in enumerate(sizes):
        for rank in range(world_size):
            first, last = max(begin, rank * chunk), min(begin + size, (rank + 1) * chunk)
            pieces[rank].append((index, max(0, first - begin), max(0, first - begin, last - begin)))
        begin += size
    return pieces


@wrong(PARTITION, reason="values", says=r"belongs to rank \d and to rank \d|whose element \d+ it has already")
def one_list_many_times(sizes, world_size):
    """[[]] * N is one list."""
    pieces = [[]] * world_size
    for rank, mine in enumerate(cut(sizes, world_size)):
        pieces[rank].extend(mine)
    return pieces


@wrong(PARTITION, reason="values", says=r"start and stop count inside the parameter|the parameter has")
def counts_from_the_beginning_of_the_model(sizes, world_size):
    """start and stop on the long line."""
    begins = [0, *accumulate(sizes)]
    return [
        [(index, begins[index] + start, begins[index] + stop) for index, start, stop in mine]
        for mine in cut(sizes, world_size)
    ]


@wrong(PARTITION, reason="values", says=r"no empty pieces|belongs to nobody")
def start_and_length(sizes, world_size):
    """(index, start, number of elements)."""
    return [[(index, start, stop - start) for index, start, stop in mine] for mine in cut(sizes, world_size)]


@wrong(PARTITION, reason="values", says=r"3 lists|lists")
def no_list_for_who_gets_nothing(sizes, world_size):
    """Ranks without a piece are left out."""
    return [mine for mine in cut(sizes, world_size) if mine]


@wrong(PARTITION, reason="values", says=r"belongs to nobody")
def one_cut_a_parameter(sizes, world_size):
    """Takes a parameter to lie on two ranks at most."""
    chunk = max(1, -(-sum(sizes) // world_size))
    pieces, begin = [[] for _ in range(world_size)], 0
    for index, size in enumerate(sizes):
        rank = begin // chunk
        room = min(size, (rank + 1) * chunk - begin)
        if room:
            pieces[rank].append((index, 0, room))
        if size > room:
            pieces[rank + 1].append((index, room, min(size, room + chunk)))
        begin += size
    return pieces


@wrong(PARTITION, reason="values", says=r"whole numbers")
def fractions(sizes, world_size):
    """/ instead of //."""
    chunk = sum(sizes) / world_size
    return cut(sizes, world_size, chunk)


@wrong(PARTITION, reason="crash", says=r"ValueError: range\(\) arg 3 must not be zero")
def steps_of_nothing(sizes, world_size):
    """Where there are no elements, the cuts are 0 apart."""
    chunk = -(-sum(sizes) // world_size)
    begins = [0, *accumulate(sizes)]
    pieces = [[] for _ in range(world_size)]
    for rank, low in enumerate(range(0, begins[-1], chunk)):
        for index, size in enumerate(sizes):
            start, stop = max(0, low - begins[index]), min(size, low + chunk - begins[index])
            if start < stop:
                pieces[rank].append((index, start, stop))
    return pieces


@wrong(PARTITION, reason="values", says=r"list that was handed in is now")
def eats_its_sizes(sizes, world_size):
    """Works the list off."""
    result = cut(list(sizes), world_size)
    if isinstance(sizes, list):
        while sizes:
            sizes.pop()
    return result


@wrong(PARTITION, reason="values", says=r"1 lists")
def only_this_rank(sizes, world_size):
    """Returns the pieces of rank 0 instead of everybody's."""
    return cut(sizes, world_size)[0]

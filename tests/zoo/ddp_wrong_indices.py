"""Lab 03, a sampler's shards: plausible mistakes, and what the check must say of each."""

from __future__ import annotations

import random
import time

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from . import wrong
from .ddp_right_more import SI, order


@wrong(SI, reason="not written", says="not written yet")
def si_stub(length, rank, world_size, epoch, seed=0):
    """The cell as the learner finds it."""
    raise NotImplementedError("not written yet")


@wrong(SI, reason="values", says=r"(?s)epochs 0 and 1 have the same order.*new order each epoch")
def si_same_order_each_epoch(length, rank, world_size, epoch, seed=0):
    """The epoch goes nowhere."""
    return order(length, 0, seed)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)epochs 0 and 1 have the same order")
def si_no_shuffle(length, rank, world_size, epoch, seed=0):
    """No shuffle at all."""
    return range(rank, length, world_size)


@wrong(SI, reason="values", says=r"(?s)seeds 0 and 1 have the same order")
def si_seed_unused(length, rank, world_size, epoch, seed=0):
    """The seed goes nowhere."""
    return order(length, epoch, 0)[rank::world_size].tolist()


@wrong(
    SI, reason="values", says=r"(?s)epochs 0 and 1 have the same order \(seed 0\).*only with seed 0: .*0 \* epoch = 0"
)
def si_seed_times_epoch(length, rank, world_size, epoch, seed=0):
    """seed * epoch is 0 for every epoch when the seed is 0."""
    return order(length, seed * epoch, 0)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)comes twice.*never.*must not depend on the rank")
def si_rank_in_the_seed(length, rank, world_size, epoch, seed=0):
    """Every rank draws an order of its own: some items come twice, some never."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * epoch + rank)
    return torch.randperm(length, generator=generator)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)1 of 13 items never come.*tail")
def si_tail_dropped(length, rank, world_size, epoch, seed=0):
    """length // N for each: the tail is dropped."""
    size = length // world_size
    return order(length, epoch, seed)[rank * size : (rank + 1) * size].tolist()


@wrong(SI, reason="values", says=r"(?s)index \d+ comes twice \(on ranks 0 and 1\).*filled up.*DistributedSampler")
def si_torchs_sampler(length, rank, world_size, epoch, seed=0):
    """torch's DistributedSampler repeats the first items until all shards are equally long."""
    sampler = DistributedSampler(range(length), num_replicas=world_size, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@wrong(SI, reason="values", says=r"(?s)every rank gets all items")
def si_everybody_gets_all(length, rank, world_size, epoch, seed=0):
    """No division among ranks."""
    return order(length, epoch, seed).tolist()


@wrong(SI, reason="values", says=r"(?s)shards of .*differ by one at most.*like cards")
def si_last_takes_the_rest(length, rank, world_size, epoch, seed=0):
    """The last rank gets all that is left: up to N-1 items more."""
    size = length // world_size
    end = length if rank == world_size - 1 else (rank + 1) * size
    return order(length, epoch, seed)[rank * size : end].tolist()


@wrong(SI, reason="values", says=r"(?s)shards of .*differ by one at most")
def si_ceil_chunks(length, rank, world_size, epoch, seed=0):
    """Slices of ceil(length / N): the last ones are short, or empty."""
    size = -(-length // world_size)
    return order(length, epoch, seed)[rank * size : (rank + 1) * size].tolist()


@wrong(SI, reason="values", says=r"(?s)torch's global random state.*Generator")
def si_global_generator(length, rank, world_size, epoch, seed=0):
    """Draws from torch's global state, which differs from rank to rank."""
    return torch.randperm(length)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)torch's global random state")
def si_reseeds_everything(length, rank, world_size, epoch, seed=0):
    """Sets the global seed: from here on dropout is the same on all ranks."""
    torch.manual_seed(seed * 100_000 + epoch)
    return torch.randperm(length)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)module random.*global random state")
def si_python_shuffle(length, rank, world_size, epoch, seed=0):
    """random.seed and random.shuffle."""
    random.seed(seed * 100_000 + epoch)
    indices = list(range(length))
    random.shuffle(indices)
    return indices[rank::world_size]


@wrong(SI, reason="values", says=r"(?s)numpy's global random state")
def si_numpy_global(length, rank, world_size, epoch, seed=0):
    """numpy.random.seed."""
    numpy.random.seed(seed * 1000 + epoch)
    return numpy.random.permutation(length)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)get different lists for the same arguments.*hash\(\) of a text")
def si_hash_of_a_text(length, rank, world_size, epoch, seed=0):
    """hash() of a text differs from process to process."""
    indices = list(range(length))
    random.Random(hash(f"{seed}/{epoch}")).shuffle(indices)
    return indices[rank::world_size]


@wrong(SI, reason="values", says=r"(?s)get different lists for the same arguments")
def si_time(length, rank, world_size, epoch, seed=0):
    """Seeded by the hour."""
    generator = torch.Generator().manual_seed(int(time.time()) // 900 + 1000 * seed + epoch)
    return torch.randperm(length, generator=generator)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)all ranks get the same list: is it the argument")
def si_asks_the_process_group(length, rank, world_size, epoch, seed=0):
    """Uses the rank of the process instead of the argument."""
    return order(length, epoch, seed)[dist.get_rank() :: dist.get_world_size()].tolist()


@wrong(SI, reason="calls", says=r"(?s)it calls broadcast.*function of its arguments alone")
def si_asks_rank_0(length, rank, world_size, epoch, seed=0):
    """Rank 0 draws, and tells the others."""
    drawn = order(length, epoch, seed)
    dist.broadcast(drawn, src=0)
    return drawn[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"index 13 is no index of 13 items")
def si_counts_from_one(length, rank, world_size, epoch, seed=0):
    """1 to length."""
    return (order(length, epoch, seed) + 1)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)it returned None")
def si_returns_nothing(length, rank, world_size, epoch, seed=0):
    """Forgets to return."""
    order(length, epoch, seed)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"(?s)it returned a generator, which has no length.*a list")
def si_generator(length, rank, world_size, epoch, seed=0):
    """A generator: it can be gone through once, and has no length."""
    return (int(index) for index in order(length, epoch, seed)[rank::world_size])


@wrong(SI, reason="values", says=r"(?s)epochs 0 and 10 have the same order")
def si_period(length, rank, world_size, epoch, seed=0):
    """Five orders, again and again."""
    return order(length, epoch % 5, seed)[rank::world_size].tolist()


@wrong(SI, reason="calls", says=r"it calls barrier")
def si_barrier(length, rank, world_size, epoch, seed=0):
    """Waits for the others first: alone it never returns."""
    dist.barrier()
    return order(length, epoch, seed)[rank::world_size].tolist()


@wrong(SI, reason="values", says=r"asked a second time for epoch 0")
def si_remembers(length, rank, world_size, epoch, seed=0, generators={}):  # noqa: B006
    """Keeps one generator per shard and goes on drawing."""
    key = (length, rank, world_size, epoch, seed)
    generator = generators.setdefault(key, torch.Generator().manual_seed(100_000 * seed + epoch))
    return torch.randperm(length, generator=generator)[rank::world_size].tolist()


@wrong(SI, reason="signature", says=r"length, rank, world_size, epoch")
def si_without_seed(length, rank, world_size, epoch):
    """No seed."""
    return order(length, epoch, 0)[rank::world_size].tolist()


@wrong(SI, reason="crash", says=r"(?s)ZeroDivisionError|IndexError")
def si_fewer_items_than_ranks(length, rank, world_size, epoch, seed=0):
    """Does not think of empty shards."""
    size = length // world_size
    extra = 13 % size
    shards = order(length, epoch, seed).tensor_split(world_size)
    return shards[rank].tolist() + [] * extra


@wrong(
    SI, reason="values", says=r"(?s)seeds 0 and 1 have the same order \(epoch 0\).*only with epoch 0: .*0 \* seed = 0"
)
def si_epoch_times_seed_plus_one(length, rank, world_size, epoch, seed=0):
    """epoch * (seed + 1) is 0 for every seed in epoch 0."""
    return order(length, epoch * (seed + 1), 0)[rank::world_size].tolist()


@wrong(
    SI, reason="values", says=r"(?s)epochs 0 and 1 the same items are together on one rank.*over all items.*shuffle all"
)
def si_own_part_shuffled(length, rank, world_size, epoch, seed=0):
    """Every rank keeps its own items for ever, in a new order each epoch."""
    mine = list(range(rank, length, world_size))
    return [mine[place] for place in order(len(mine), epoch, seed)]


@wrong(SI, reason="values", says=r"(?s)epochs 0 and 1 \d+% of the items follow the same one.*rolled")
def si_rolled(length, rank, world_size, epoch, seed=0):
    """One order, rolled on by an item each epoch."""
    return order(length, 0, seed).roll(epoch)[rank::world_size].tolist()


@wrong(SI, reason="crash", says=r"(?s)tuple index out of range.*tensor_split")
def si_chunks(length, rank, world_size, epoch, seed=0):
    """chunk(N) gives fewer than N pieces when there are few items."""
    return order(length, epoch, seed).chunk(world_size)[rank].tolist()


@wrong(SI, reason="values", says=r"(?s)1 comes more than once, 1 never")
def si_off_by_one(length, rank, world_size, epoch, seed=0):
    """The first item of the order in place of the second one."""
    shuffled = order(length, epoch, seed)
    shuffled[1:2] = shuffled[:1]
    return shuffled[rank::world_size].tolist()

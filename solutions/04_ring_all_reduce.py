# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 - Ring all-reduce
#
# **You build:** `ring_reduce_scatter`, `ring_all_gather` and `ring_all_reduce`, from nothing but messages between two
# neighbours. **Time:** 60 to 90 minutes.
#
# **Where this stands.** In data-parallel training every GPU holds a copy of the model and computes gradients on its own
# part of the batch. Before the optimizer steps, all copies need the *sum* of all gradients. That operation is called
# **all-reduce**: everybody starts with a tensor, everybody ends with the sum of all tensors. It happens once per
# training step, on as many numbers as the model has parameters, so its cost decides whether more GPUs help at all.
#
# At the end of this notebook your own code will do it, and its busiest rank will send as few bytes as any method
# allows. You will have measured that it does. The later labs run on the two halves that you write here: ZeRO shards a
# model with exactly `reduce_scatter` and `all_gather`.
#
# **How to work.** Run the cells from top to bottom (Shift+Enter). Where a cell says `not written yet`, it is your turn.
# Every exercise has a check right below it, which runs your code on real processes and says what it saw. Hints fold
# open one at a time, from a nudge to almost the answer. Before most measurements there is a field for a prediction:
# write one down, even a wild one. The gap between the two is where the learning is.
#
# **Two letters.** Everywhere in this notebook N is the number of ranks, and n is the size of the tensor in bytes.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes) in most cells, at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
MEGABYTES = 4  # size of the tensor in most measurements, in MB (1 MB is 10**6 bytes)

# %% tags=["export"]
import torch
import torch.distributed as dist

# %%
import hashlib
import time

from shardlab import check, device, launch, predict, reuse, show, table, theory, trace_ring
from shardlab.errors import LaunchError
from shardlab.fingerprint import fingerprint
from shardlab.ledger import LedgerRow, record
from shardlab.meters import label, memory_so_far
from shardlab.model import GPT, SMALL, loss_function
from shardlab.text import batch
from shardlab.widgets import charts

NUMEL = int(MEGABYTES * 10**6) // 4  # elements: a float32 has 4 bytes
NBYTES = 4 * NUMEL

# %% [markdown]
# ## 1. Ranks and messages, in two minutes
#
# `launch(fn, world_size=N)` starts N separate Python processes and runs the same function `fn` in each. A process of
# such a group is called a **rank**, and is numbered 0 to N-1. N is the **world size**. The ranks share no memory. The
# only way for a number to get from one to another is a message:
#
# - `dist.send(tensor, dst)` gives `tensor` to rank `dst` and **returns when that rank has received it**;
# - `dist.recv(tensor, src)` waits for a message from rank `src` and writes it **into** `tensor`, which must have the
#   right size and type already;
# - `dist.isend` and `dist.irecv` are the same, but return at once with a handle. `handle.wait()` returns when the
#   message is through. Until then, do not change the tensor that is being sent, and do not read the one that is being
#   received.
#
# (So it is on CPUs, with the backend called gloo. On GPUs, with NCCL, all four only put the message into the GPU's
# queue, and `wait()` makes the GPU wait instead of the Python code. Which tensor you may touch when is the same.)
#
# `launch` returns a record of the run: `run.results[r]` is what the function returned on rank r, `run.traffic[r]` what
# rank r sent and received. `device()` is the device of the rank that asks: its GPU, or the CPU.
#
# Here every rank sends its number to the right, to rank `(r + 1) % N`, and receives from the left, rank `(r - 1) % N`.
# The `%` closes the line of ranks into a ring: the right neighbour of the last rank is rank 0.


# %%
def meet_the_neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size

    mine = torch.tensor([float(rank)], device=device())
    received = torch.empty(1, device=device())
    sending = dist.isend(mine, right)
    dist.recv(received, left)
    sending.wait()
    return (
        f"rank {rank}: sent {rank} to rank {right}, received {int(received)} from rank {left}"
    )


run = launch(meet_the_neighbours, world_size=WORLD_SIZE, device=DEVICE)
print("\n".join(run.results))

# %% [markdown]
# ### Break it on purpose: everybody sends first
#
# `dist.send` waits for its receiver. So what happens when every rank sends *before* it receives? Think of four people
# in a circle who each hold out a parcel with both hands, and take one only when theirs is gone.
#
# Run the cell. Nothing hangs: `launch` watches what every rank waits for, finds the circle, ends the ranks and reports.


# %%
def everybody_sends_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)], device=device())
    received = torch.empty(1, device=device())
    dist.send(mine, right)
    dist.recv(received, left)


try:
    launch(everybody_sends_first, world_size=WORLD_SIZE, device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# Read the report from the top: who waits for whom, in which call, on which line. A deadlock is always such a circle, or
# a wait for somebody who has already left. You now know the two ways out: start the send with `isend` and receive while
# it is under way, or let some ranks receive first. In a ring the first way is the simpler one.
#
# ## 2. The obvious way, and its bottleneck
#
# One rank collects everything, adds, and hands out the sum.


# %%
def naive_all_reduce(tensor):
    """The sum over all ranks, in place: rank 0 collects, adds, and sends the sum back."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        incoming = torch.empty_like(tensor)
        for other in range(1, world_size):
            dist.recv(incoming, other)
            tensor += incoming
        for other in range(1, world_size):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


# %% [markdown]
# **Predict.** How many bytes does rank 0 *receive* when N ranks reduce a tensor of n bytes this way? Then, how many
# does rank 1 receive? You may type arithmetic.

# %%
received_by_0 = predict(
    "bytes received by rank 0, naive all-reduce", unit="bytes", N=WORLD_SIZE, n=NBYTES
)

# %%
received_by_1 = predict(
    "bytes received by rank 1, naive all-reduce", unit="bytes", N=WORLD_SIZE, n=NBYTES
)


# %%
def sum_with(all_reduce, numel):
    """Runs on every rank: makes a tensor, all-reduces it, returns its first and last element."""
    tensor = torch.full((numel,), float(dist.get_rank() + 1), device=device())
    all_reduce(tensor)
    return tensor[0].item(), tensor[-1].item()


naive = launch(sum_with, WORLD_SIZE, args=(naive_all_reduce, NUMEL), device=DEVICE)
received_by_0.compare(naive.traffic[0].received)

# %%
received_by_1.compare(naive.traffic[1].received)

# %%
show(naive)

# %% [markdown]
# Rank 0 receives N-1 tensors and sends N-1 tensors; every other rank sends one and receives one. The links of the
# others lie idle while rank 0 works through its queue. And its queue grows with every rank that joins: this method does
# not scale.
#
# | naive all-reduce | receives | sends |
# |---|---|---|
# | rank 0 | (N-1) n | (N-1) n |
# | any other rank | n | n |
#
# ### How few bytes could it be?
#
# Look at one single element, of which each of the N ranks has its own value, and at the messages about it. Each carries
# one number. Put them in the order in which they arrive.
#
# - *Until the first rank knows the sum*, at least N-1 messages have arrived. To be in the sum, all N values must have
#   come together, and a message can join only two ranks that were not connected before: N ranks need N-1 joins.
# - *After that*, at least N-1 more must arrive. Only the rank that got the last message knows the sum. Each of the
#   other N-1 ranks does not, so at least one message must still reach it.
#
# That makes 2(N-1) messages of one element, and for the whole tensor all ranks together send at least 2(N-1) n bytes.
# Somebody sends at least the average, so the **busiest rank** sends at least
#
# $$\frac{2(N-1)}{N}\,n .$$
#
# This is just under 2n, **however many ranks there are** (Patarasuk & Yuan 2009), and it is reached only when all ranks
# send equally much. So the question becomes: can all ranks be equally busy, all the time?
#
# ## 3. The ring
#
# Cut the tensor into N **chunks**. Chunk 0 is the first n/N elements, chunk 1 the next, and so on; every rank cuts in
# the same places. And let every rank talk to its two neighbours only: send to the right, receive from the left.
#
# ```text
#        rank 0 ------> rank 1
#          ^              |
#          |              v
#        rank 3 <------ rank 2
# ```
#
# Follow chunk 0 alone, with N = 4. It sets out on rank 1 as rank 1's own values. Rank 1 sends it to rank 2, which adds
# its own values for chunk 0. The sum of two goes to rank 3, which adds its values. The sum of three goes to rank 0,
# which adds its values: chunk 0 is now complete, on rank 0. That took N-1 = 3 messages.
#
# Chunk 1 makes the same journey one place further on: it sets out on rank 2 and ends, complete, on rank 1. Chunk c sets
# out on rank c+1 and ends on rank c. All N chunks travel **at the same time**, each one place behind the next, so in
# every step every rank sends one chunk and receives another. Nobody is left out, nobody is busier than the others.
#
# This first half is called **reduce-scatter**: the sum exists, but scattered, rank r has chunk r of it.
#
# **Predict.** How many messages does one rank send in this first half, and how many bytes?

# %%
scatter_messages = predict("messages sent by one rank, ring reduce-scatter", N=WORLD_SIZE)

# %%
scatter_bytes = predict(
    "bytes sent by one rank, ring reduce-scatter", unit="bytes", N=WORLD_SIZE, n=NBYTES
)

# %% [markdown]
# ### Exercise 04.ring_reduce_scatter
#
# *Difficulty: medium. Importance: high, ZeRO is built on it. Give it 20 minutes.*
#
# **Contract.** `chunks` is a list of N one-dimensional tensors. Chunk c has the same size on every rank, but two chunks
# may differ in size, and a chunk may be empty. When the function returns, `chunks[r]` on rank r is the sum of all
# ranks' chunk r. It is changed in place: the tensors in the list are often views of one big tensor, and the result must
# be seen there. The other chunks may hold anything. Nothing needs to be returned. Use `isend`/`recv` (or `irecv`) with
# the two neighbours only, and send no chunk twice. With N = 1 there is nothing to do.
#
# <details><summary>Hint 1: a nudge</summary>
#
# In each step a rank sends one chunk and receives a different one, into a buffer of its own, and then adds the buffer
# to its chunk. Take pencil and paper for N = 4 and write down, for rank 0, which chunk goes out and which comes in, in
# steps 0, 1, 2. Chunk c sets out on rank c+1.
# </details>
#
# <details><summary>Hint 2: which chunk first</summary>
#
# Rank r starts chunk r-1 on its way (it "sets out on rank c+1"). One step later it passes on what it received in the
# step before: the chunk that started one rank further left, r-2. In the last step it must receive chunk r.
# </details>
#
# <details><summary>Hint 3: the indices</summary>
#
# In step s = 0, 1, ..., N-2, rank r sends chunk (r - 1 - s) % N and receives chunk (r - 2 - s) % N. In the last step, s
# = N-2, it receives chunk (r - N) % N = r. In Python `%` of a negative number is what you want: `-1 % 4` is 3.
# </details>
#
# <details><summary>Hint 4: almost the answer</summary>
#
# ```python
# for step in range(world_size - 1):
#     outgoing = chunks[...]
#     mine = chunks[...]
#     buffer = torch.empty_like(mine)
#     sending = dist.isend(outgoing, right)
#     dist.recv(buffer, left)
#     mine += buffer
#     sending.wait()
# ```
# Waiting for the send at the end of the step, not right after `isend`, lets both directions run at once. But every send
# must be waited for before the function returns: after that, whoever called it may overwrite a chunk that is still
# being read.
# </details>


# %% nbgrader={"grade": false, "grade_id": "ring_reduce_scatter", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def ring_reduce_scatter(chunks):
    """Leaves the sum over all ranks of chunk r in `chunks[r]` on rank r, in place.

    chunks: a list of N 1-D tensors, chunk c of the same size on every rank. The other chunks hold
    partial sums afterwards.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    buffer = torch.empty_like(max(chunks, key=torch.numel))
    for step in range(world_size - 1):
        outgoing = chunks[(rank - 1 - step) % world_size]
        mine = chunks[(rank - 2 - step) % world_size]
        incoming = buffer[: mine.numel()]
        # The receive is posted first, so that the message finds its place ready.
        receiving = dist.irecv(incoming, left)
        sending = dist.isend(outgoing, right)
        receiving.wait()
        mine += incoming
        sending.wait()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-ring_reduce_scatter", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("04.ring_reduce_scatter", ring_reduce_scatter)

# %% [markdown]
# ### Watch your own run
#
# `trace_ring` runs your function once more, on data that reveals who contributed: the picture is what your code did,
# message by message. Every row is a rank, every column a chunk; a coloured block in a cell says whose numbers have been
# added there. Step with the arrow keys or the buttons (the picture counts its steps from 1; step 0 is the state
# before). A mistake shows as a block that is missing or counted twice, or as a chunk that is complete in the wrong
# place.

# %%
show(trace_ring(ring_reduce_scatter, WORLD_SIZE, phase="reduce_scatter"))

# %% [markdown]
# The diagonal is complete: rank r holds the finished chunk r. The rest are partial sums that nobody needs any more.


# %%
def reduce_scatter_once(numel):
    tensor = torch.ones(numel, device=device())
    ring_reduce_scatter(list(tensor.tensor_split(dist.get_world_size())))


run = launch(reduce_scatter_once, WORLD_SIZE, args=(NUMEL,), device=DEVICE)
scatter_messages.compare(run.traffic[0].messages_sent)

# %%
scatter_bytes.compare(run.traffic[0].sent)

# %% [markdown]
# ## 4. The second half: all-gather
#
# Every rank now has one finished chunk, and everybody needs all of them. Send them round the same ring once more. This
# time nothing is added: what arrives is finished, and replaces what was there.
#
# ### Exercise 04.ring_all_gather
#
# *Difficulty: easy, if the first is done. Importance: high. Give it 10 minutes.*
#
# **Contract.** The same kind of list. On entry `chunks[r]` on rank r is finished, and the other chunks hold garbage.
# When the function returns, every rank has every finished chunk, in place. Again two neighbours, and no chunk sent
# twice.
#
# <details><summary>Hint 1: a nudge</summary>
#
# What can a rank send in the first step? It has one chunk that is worth sending. And in the second step?
# </details>
#
# <details><summary>Hint 2: the indices</summary>
#
# In step s rank r sends chunk (r - s) % N, which is its own in step 0 and what it received a step ago later on. It
# receives chunk (r - 1 - s) % N. No buffer is needed: receive straight into the chunk.
# </details>


# %% nbgrader={"grade": false, "grade_id": "ring_all_gather", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def ring_all_gather(chunks):
    """Copies `chunks[r]` of rank r to every other rank's `chunks[r]`, in place, for all r.

    chunks: a list of N 1-D tensors, chunk c of the same size on every rank.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        receiving = dist.irecv(chunks[(rank - 1 - step) % world_size], left)
        sending = dist.isend(chunks[(rank - step) % world_size], right)
        receiving.wait()
        sending.wait()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-ring_all_gather", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("04.ring_all_gather", ring_all_gather)

# %%
show(trace_ring(ring_all_gather, WORLD_SIZE, phase="all_gather"))

# %% [markdown]
# ## 5. Together: all-reduce of any tensor
#
# Cut, reduce-scatter, all-gather. What is left is the real world: a tensor may have any shape and any type, its size
# need not be a multiple of N, and its elements may not lie in memory row by row, without gaps. `send` and `recv` accept
# only tensors that do, called **contiguous**. A transposed matrix is not, and neither is every second column of one.
#
# ### Exercise 04.ring_all_reduce
#
# *Difficulty: medium; the cutting has traps. Importance: high. Give it 20 minutes.*
#
# **Contract.** `tensor` has any shape (also none at all, `torch.tensor(3.0)`, and no elements) and any type that can be
# added. When the function returns, `tensor` itself holds the sum on every rank. If it is a view of a bigger tensor, its
# elements in there have changed, and all others have not. Every rank sends 2(N-1)/N n bytes, or a little more if you
# pad the tensor up to a multiple of N elements.
#
# <details><summary>Hint 1: a trap</summary>
#
# How many chunks does `torch.arange(5).chunk(4)` make? Three: it rounds the size of a chunk up to 2 first.
# `tensor_split` makes as many as you ask for.
# </details>
#
# <details><summary>Hint 2: a flat view, if there is one</summary>
#
# `tensor.contiguous()` is the tensor itself when it is contiguous, and a copy when it is not. `.view(-1)` of that is
# one-dimensional. If it is a copy, the sum must be written back at the end, with `tensor.copy_(...)`.
# </details>


# %% nbgrader={"grade": false, "grade_id": "ring_all_reduce", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def ring_all_reduce(tensor):
    """Leaves the sum over all ranks in `tensor`, in place, on every rank. Any shape and dtype.

    Every rank sends 2(N-1)/N n bytes in 2(N-1) messages (Patarasuk & Yuan 2009).
    """
    ### BEGIN SOLUTION
    flat = tensor.contiguous().view(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    ring_reduce_scatter(chunks)
    ring_all_gather(chunks)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-ring_all_reduce", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("04.ring_all_reduce", ring_all_reduce)

# %% tags=["picture"]
show(trace_ring(ring_all_reduce, WORLD_SIZE, phase="all_reduce"))

# %% [markdown]
# ## 6. Predicted and measured
#
# **Predict.** How many times as many bytes does a rank send with 8 ranks as with 2, for the same tensor?

# %%
growth = predict("bytes sent by a rank with N = 8, divided by the same with N = 2")

# %% [markdown]
# A rank sends one chunk per step, of n/N bytes, in N-1 steps per half:
#
# $$\text{messages} = 2(N-1), \qquad \text{bytes sent} = 2(N-1)\cdot\frac{n}{N} = \frac{2(N-1)}{N}\,n .$$
#
# That is the lower bound of section 2. Here it stands beside what your code did:

# %%
# NBVAL_CHECK_OUTPUT
WORLD_SIZES = range(2, 9)
LENGTH = 840_000  # elements; 840 is a multiple of every N up to 8
runs = {
    N: launch(sum_with, N, args=(ring_all_reduce, LENGTH), device="cpu") for N in WORLD_SIZES
}
n = 4 * LENGTH  # bytes
table(
    [
        {
            "N": N,
            "messages predicted": 2 * (N - 1),
            "messages": max(rank.messages_sent for rank in runs[N].traffic),
            "bytes predicted": 2 * (N - 1) * n // N,
            "bytes, busiest rank": max(rank.sent for rank in runs[N].traffic),
            "bytes, laziest rank": min(rank.sent for rank in runs[N].traffic),
        }
        for N in WORLD_SIZES
    ],
    equal=("bytes predicted", "bytes, busiest rank"),
)

# %%
growth.compare(runs[8].traffic[0].sent / runs[2].traffic[0].sent)

# %%
charts.bytes_per_rank(
    [(N, [rank.sent for rank in runs[N].traffic], 2 * (N - 1) * n / N) for N in WORLD_SIZES]
)

# %% [markdown]
# Four times the ranks, and a rank sends 1.75 times as much; with a thousand ranks it would be 1.998 times. Beside it
# the busiest rank of the naive way:

# %%
# NBVAL_CHECK_OUTPUT
naive_runs = {
    N: launch(sum_with, N, args=(naive_all_reduce, LENGTH), device="cpu") for N in (2, 4, 8)
}
table(
    [
        {
            "N": N,
            "naive: rank 0 sends": naive_runs[N].traffic[0].sent,
            "naive: rank 1 sends": naive_runs[N].traffic[1].sent,
            "ring: rank 0 sends": runs[N].traffic[0].sent,
            "naive / ring, rank 0": naive_runs[N].traffic[0].sent / runs[N].traffic[0].sent,
        }
        for N in naive_runs
    ]
)

# %% [markdown]
# The last column is N/2: (N-1) n divided by 2(N-1)/N n. Rank 0 was the bottleneck, and now there is none.
#
# ### The number of steps depends on the ranks, not on the parameters
#
# A common mistake is to think that a ring makes one step per parameter. It makes 2(N-1) steps, whether a tensor has a
# hundred elements or a million. Only the chunks grow.


# %%
def messages_of_rank_0(world_size, numel):
    run = launch(sum_with, world_size, args=(ring_all_reduce, numel), device="cpu")
    return run.traffic[0].messages_sent


lengths = [100, 1_000, 10_000, 100_000, 1_000_000]
messages = {f"N = {N}": [messages_of_rank_0(N, numel) for numel in lengths] for N in (2, 4, 8)}
charts.steps_against(
    lengths, messages, xlabel="elements", ylabel="messages sent by a rank", log=True
)

# %% [markdown]
# ### When N does not divide the tensor
#
# `tensor_split` gives the first `numel % N` chunks one element more. Which chunks a rank sends decides what it sends,
# so ranks differ by an element or two. `theory.ring_all_reduce_bytes` follows every chunk:

# %%
# NBVAL_CHECK_OUTPUT
uneven = launch(sum_with, 4, args=(ring_all_reduce, 10), device="cpu")
table(
    [
        {
            "rank": rank.rank,
            "bytes predicted": theory.ring_all_reduce_bytes(10, 4, 4, rank.rank).sent,
            "bytes sent": rank.sent,
        }
        for rank in uneven.traffic
    ],
    equal=("bytes predicted", "bytes sent"),
    title="10 float32 on 4 ranks: chunks of 3, 3, 2, 2",
)

# %% [markdown]
# ## 7. The same from the library
#
# `dist.all_reduce` is what you would call in real work. Does it give the same numbers?


# %%
def compare_with_library(numel, seed):
    torch.manual_seed(seed + dist.get_rank())  # different numbers on every rank
    mine = torch.randn(numel, device=device())
    theirs = mine.clone()
    ring_all_reduce(mine)
    dist.all_reduce(theirs)
    fingerprint = hashlib.sha256(mine.cpu().numpy().tobytes()).hexdigest()  # of every bit
    return (mine - theirs).abs().max().item(), fingerprint


run = launch(compare_with_library, WORLD_SIZE, args=(100_000, SEED), device=DEVICE)
print("largest difference from dist.all_reduce:", max(largest for largest, _ in run.results))
print("ranks of your ring that differ in any bit:", len({bits for _, bits in run.results}) - 1)
for name, totals in run.traffic[0].by_operation.items():
    print(f"{name:>10}: {totals.calls} calls, {totals.sent:,.0f} bytes sent")

# %% [markdown]
# The difference is rounding: floating-point addition depends on the order, and the two may add in different orders. But
# all ranks of your ring agree to the last bit, since every chunk was added up once, on one way round the ring, and then
# copied. That matters: copies of a model that differ in the last bit drift apart.
#
# A word on honesty. Your sends and receives were counted one by one. A library does not tell what it really sends, so
# for its `all_reduce` the meter books the *published* cost of the best algorithm, 2(N-1)/N n. Your ring's figure is
# measured, the library's is booked. Here they are side by side:

# %%
# NBVAL_CHECK_OUTPUT
library_runs = {
    N: launch(sum_with, N, args=(dist.all_reduce, LENGTH), device="cpu") for N in WORLD_SIZES
}
table(
    [
        {
            "N": N,
            "your messages": runs[N].traffic[0].messages_sent,
            "library calls": library_runs[N].traffic[0].by_operation["all_reduce"].calls,
            "your bytes, measured": runs[N].traffic[0].sent,
            "library's bytes, booked": library_runs[N].traffic[0].sent,
        }
        for N in WORLD_SIZES
    ],
    equal=("your bytes, measured", "library's bytes, booked"),
)

# %% [markdown]
# ### A training step on your ring
#
# Now what it is for. N ranks train the course's small GPT: each takes its part of the batch and computes fp16
# gradients, with the engine of lab 01. The gradients are laid out in one flat tensor, divided by N, and summed by your
# ring. Every rank then makes the same step. psi is the number of parameters, and an fp16 gradient has 2 bytes, so n =
# 2 psi.

# %%
MixedPrecisionAdam = reuse("01_model_states").MixedPrecisionAdam


def train_on_the_ring(all_reduce, steps):
    """Some steps on this rank's part of the batch. The bytes of its model states, and a hash of all its weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = GPT(SMALL).half().to(device())
    parameters = list(model.parameters())
    engine = MixedPrecisionAdam(parameters)
    for values in engine.state.values():
        label("optimizer", [value for value in values.values() if torch.is_tensor(value)])
    for step in range(steps):
        inputs, targets = (
            part.tensor_split(world_size)[rank].to(device())
            for part in batch(step, 24, 32, SEED)
        )
        engine.zero_grad()
        engine.backward(loss_function(model(inputs), targets))
        gradients = [parameter.grad for parameter in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / world_size
        all_reduce(flat)
        for gradient, mean in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))
        del flat
        engine.step()
    held = memory_so_far().at_end
    return held.parameters + held.gradients + held.optimizer, fingerprint(model)


STEPS = 2
run = launch(train_on_the_ring, WORLD_SIZE, args=(ring_all_reduce, STEPS), device=DEVICE)
print("ranks whose weights differ:", len({weights for _, weights in run.results}) - 1)

# %% [markdown]
# All copies of the model are still equal, to the last bit. What a step costs goes into the ledger, the table that runs
# through the labs, as a row beside the others that you have recorded. (The engine's all-reduce of one number, by which
# all ranks agree to skip, is left out.)

# %%
psi = GPT(SMALL).parameter_count
busiest = max(run.traffic, key=lambda rank: rank.by_operation["send"].sent)
record(
    LedgerRow(
        lab="04",
        strategy="DDP, your ring",
        world_size=WORLD_SIZE,
        held=max(held for held, _ in run.results),
        held_formula=theory.model_state_bytes("ddp", psi, WORLD_SIZE),
        sent=busiest.by_operation["send"].sent / STEPS,
        sent_formula=2 * theory.step_volume("ddp", psi, WORLD_SIZE).sent,
        messages=busiest.messages_sent // STEPS,
        limited_by="every link, equally",
    )
)

# %% [markdown]
# ## 8. Time: the alpha-beta model
#
# Bytes are not seconds. The simplest model that explains the seconds has two numbers. A message costs a fixed time
# **alpha**, however small it is (the latency), and a time **beta** for every byte (one over the bandwidth):
#
# $$t(\text{message of } b \text{ bytes}) = \alpha + \beta\, b .$$
#
# A ring all-reduce makes 2(N-1) steps of n/N bytes, so
#
# $$t_\text{ring}(n) = 2(N-1)\left(\alpha + \beta\,\frac{n}{N}\right).$$
#
# **Predict** before you measure: on *this* machine, for a tensor of 16 MB, how many times as long as the ring does the
# naive way take?

# %%
slower = predict("time of the naive way divided by time of the ring, 16 MB", N=WORLD_SIZE)

# %% [markdown]
# Now measure the ring at several sizes, and find the alpha and beta that fit. Each time is the shortest of several:
# whatever else the machine does can only make a call slower.


# %%
def time_all_reduce(all_reduce, lengths, repeats):
    """Seconds of a call at each length (elements), on this rank: the shortest of the repeats."""
    shortest = []
    for numel in lengths:
        tensor = torch.ones(numel, device=device())
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            all_reduce(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            tensor.fill_(1.0)
        shortest.append(min(seconds))
    return shortest


def slowest_rank(all_reduce, lengths, repeats=12):
    """The time of an all-reduce at each length, in seconds: all ranks must be done."""
    arguments = (all_reduce, lengths, repeats)
    run = launch(time_all_reduce, WORLD_SIZE, args=arguments, device=DEVICE, meter=False)
    return [max(of_ranks) for of_ranks in zip(*run.results, strict=True)]


timed_lengths = [4**k for k in range(4, 12)]  # elements: 256 to 4,194,304
ring_seconds = slowest_rank(ring_all_reduce, timed_lengths)

STEPS = 2 * (WORLD_SIZE - 1)
per_step = [4 * numel / WORLD_SIZE for numel in timed_lengths]  # bytes
alpha, beta = theory.fit_alpha_beta(
    [(STEPS, nbytes, seconds) for nbytes, seconds in zip(per_step, ring_seconds, strict=True)]
)
print("alpha:", theory.format_seconds(alpha), "per message")
print("beta: ", theory.format_seconds(beta * 10**6), "per MB")

# %%
charts.alpha_beta_fit(
    [(nbytes, seconds / STEPS) for nbytes, seconds in zip(per_step, ring_seconds, strict=True)],
    alpha,
    beta,
    title="time of one ring step",
)

# %% [markdown]
# On the left the time hardly depends on the size: latency rules, and sending many small tensors is wasteful. That is
# why lab 05 collects gradients into buckets. On the right it grows with the bytes, and the ring is at its best.
#
# Where ranks share the cores of one machine, alpha and beta describe that machine's scheduler and memory rather than a
# network, and the fit is rough: it has two numbers for everything. Its use is the shape of the curve, and a first
# estimate.
#
# Now let the model predict the naive way, and measure it. Rank 0 handles 2(N-1) messages of the whole n, one after the
# other:
#
# $$t_\text{naive}(n) = 2(N-1)\,(\alpha + \beta\, n).$$

# %%
naive_seconds = slowest_rank(naive_all_reduce, timed_lengths)
table(
    [
        {
            "bytes": 4 * numel,
            "ring, model (ms)": 1e3
            * theory.ring_all_reduce_time(4 * numel, WORLD_SIZE, alpha, beta),
            "ring, measured (ms)": 1e3 * ring,
            "naive, model (ms)": 1e3
            * theory.naive_all_reduce_time(4 * numel, WORLD_SIZE, alpha, beta),
            "naive, measured (ms)": 1e3 * naive,
        }
        for numel, ring, naive in zip(timed_lengths, ring_seconds, naive_seconds, strict=True)
    ]
)

# %%
slower.compare(naive_seconds[-1] / ring_seconds[-1])

# %% [markdown]
# Compare the columns on your machine, and be a critic. The model says that the ring wins at every size, and by a factor
# of nearly N for large ones. On a machine with fewer cores than ranks you will not see that, and here is why. Add up
# what *all* ranks send: the naive way sends 2(N-1) n, and the ring sends N times 2(N-1)/N n, which is the same. The
# ring moves no fewer bytes, it spreads them over all links. Where all links are one memory and two cores, spreading
# gains nothing, and the ring even pays for waking up every rank in every step. On N GPUs, or N machines, each rank has
# a link of its own, and the busiest one decides.
#
# For comparing machines of different sizes, NVIDIA's `nccl-tests` reports the **bus bandwidth**: bytes n divided by the
# time, times 2(N-1)/N. It is the rate at which each link was really used, so it can be held against what the hardware
# promises.

# %%
largest, seconds = 4 * timed_lengths[-1], ring_seconds[-1]
algorithm = theory.algorithm_bandwidth(largest, seconds)
bus = theory.bus_bandwidth("all_reduce", largest, seconds, WORLD_SIZE)
print(f"{theory.format_bytes(largest)} in {theory.format_seconds(seconds)}")
print(f"algorithm bandwidth {theory.format_bytes(algorithm)}/s")
print(f"bus bandwidth       {theory.format_bytes(bus)}/s")

# %% [markdown]
# ## 9. Break it on purpose: a wrong index
#
# This ring is off by one: it starts with chunk r instead of chunk r-1. Step through the picture. Which chunk is
# complete on which rank?


# %%
def off_by_one(chunks):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing, mine = (
            chunks[(rank - step) % world_size],
            chunks[(rank - 1 - step) % world_size],
        )
        incoming = torch.empty_like(mine)
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        mine += incoming
        sending.wait()


show(trace_ring(off_by_one, WORLD_SIZE, phase="reduce_scatter"))

# %% [markdown]
# It is a perfectly good reduce-scatter, of another convention: rank r ends with chunk r+1. Follow it with an all-gather
# of the same convention and the all-reduce is right. Follow it with *yours*, and every rank hands out a chunk that is
# not finished. Nothing crashes, no message is missing, the numbers are just wrong. Conventions between the two halves
# are part of the contract.
#
# ## 10. What production systems do differently
#
# - **NCCL** runs several rings at once over different links, cuts each chunk into slices so that adding one slice
#   overlaps with receiving the next, and does both in one GPU kernel. For small tensors, where alpha rules, it uses
#   trees, whose number of steps grows with log N instead of N.
# - On a network of machines with several GPUs each, the ring is often hierarchical: first inside a machine, then
#   between machines, since the two kinds of link differ tenfold in bandwidth.
# - Some switches can add numbers themselves. Then a rank sends n and receives n: for many ranks about half of the bound
#   of section 2, which counts what ranks must send when only ranks can add.
# - PyTorch's `DistributedDataParallel` does not wait for all gradients before it starts. Lab 05 builds that.
#
# ## 11. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** A model has 7.5 billion parameters with fp16 gradients, and is trained on 64 GPUs. How many messages does a
# rank send in one ring all-reduce of all gradients, and how many bytes?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-steps", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 2(N-1) = 126 messages, whatever the size of the model. Bytes: n = 15 GB, times 2(N-1)/N = 1.96875, makes 29.5 GB.

# %% [markdown]
# **Q2.** How much memory does a ring all-reduce need on a rank, beyond the tensor itself?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-memory", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# One receive buffer of a chunk, n/N elements, during the first half. In the second half chunks are received in place. A
# tensor that is not contiguous costs a copy of n elements on top.

# %% [markdown]
# **Q3.** In a reduce-scatter with `isend`, a rank adds to one chunk while another is still being sent. Why is that
# safe? Where at the latest must a rank wait for its sends, and what goes wrong if it never does?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-wait", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# The chunk that is being sent and the chunk that is added to are different ones, and in this half a chunk that was sent
# once is never written again. So a rank could wait for all its sends at the end, but not later: the all-gather that
# follows receives into these very chunks. Without the wait, a slow link would send what the all-gather has already
# written there: wrong sums, now and then.

# %% [markdown]
# ## Sources
#
# - P. Patarasuk, X. Yuan: *Bandwidth optimal all-reduce algorithms for clusters of workstations*, Journal of Parallel
#   and Distributed Computing 69(2), 2009: the ring and the lower bound.
# - R. Thakur, R. Rabenseifner, W. Gropp: *Optimization of collective communication operations in MPICH*, IJHPCA 19(1),
#   2005: the alpha-beta model and when trees win.
# - `doc/PERFORMANCE.md` of NVIDIA's nccl-tests: algorithm and bus bandwidth.
# - S. Rajbhandari et al.: *ZeRO: Memory optimizations toward training trillion parameter models*, arXiv 1910.02054,
#   section 7: what ZeRO does with the two halves.

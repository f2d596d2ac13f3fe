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
# # 00 - Ranks and messages
#
# **You build:** a token that goes round all processes without a deadlock, and a `broadcast` made of single messages.
# **Time:** 60 to 90 minutes.
#
# **Where this stands.** This is the first lab. You have trained models with PyTorch in one process on one GPU, or on
# the CPU, and have never run two processes that work together. Everything in this course happens between processes, so
# here you start some, let them talk, make them wait for each other for ever, and read what went wrong.
#
# At the end you know what a rank is and what it can do, you have seen the seven operations with which all of
# data-parallel training is written, and you can tell what each of them costs. The `broadcast` that you build comes back
# in lab 03, where it gives all copies of a model the same weights.
#
# **How to work.** Run the cells from top to bottom (Shift+Enter). Where a cell says `not written yet`, it is your turn.
# Every exercise has a check right below it, which runs your code on real processes and says what it saw. Hints fold
# open one at a time, from a nudge to almost the answer. Before most measurements there is a field for a prediction:
# write one down, even a wild one. The gap between the two is where the learning is.
#
# **Two letters.** Everywhere in this course N is the number of processes, and n is the size of a tensor in bytes.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of processes in most cells, at least 2
DEVICE = "auto"  # "auto": one GPU per process if there are enough, else the CPU
SEED = 0

# %% tags=["export"]
import torch
import torch.distributed as dist

# %%
import os
import signal

from shardlab import check, device, launch, predict, show, table, theory, trace_collective
from shardlab.errors import LaunchError
from shardlab.rounds import broadcast_rounds
from shardlab.widgets import charts

# %% [markdown]
# ## 1. Why one process is not enough
#
# A training script is usually one Python process that drives one GPU. Two things end that.
#
# - **Time.** If a training step takes one second and the training needs a million steps, it takes 1,000,000 / 86,400 =
#   11.6 days. The step cannot be made much faster, but its batch can be divided: eight GPUs that each work on an eighth
#   of the samples could be done in a day and a half.
# - **Memory.** Lab 01 counts 16 bytes for every parameter of a model in training. With 7.5 billion parameters that
#   makes 120 GB, more than most GPUs have. What does not fit on one must be divided.
#
# So there will be several GPUs. Why several *processes* too? One Python process executes one line of Python at a time,
# whatever the number of its threads (lab 02 measures what that costs), and a process cannot reach beyond its machine.
# One process for each GPU has neither problem, and the same code runs on one machine and on a hundred.
#
# Three words, then:
#
# - A **process group** is a set of processes that know of each other and can exchange messages.
# - The **world size** N is the number of processes in the group.
# - The **rank** of a process is its number in the group, 0 to N-1. One also says "rank 2" for the process itself.
#
# `launch(fn, world_size=N)` starts N fresh Python processes, forms a process group of them, and runs the function `fn`
# in each. All run the *same* function. Only the rank tells a process which part is its own. A fresh process knows
# nothing of this notebook: `launch` sends each one the function, and copies of what the function uses from here.


# %%
def who_am_i():
    return f"I am rank {dist.get_rank()} of {dist.get_world_size()}, process {os.getpid()}"


run = launch(who_am_i, world_size=WORLD_SIZE, device=DEVICE)
print("\n".join(run.results))
print(f"and this notebook is process {os.getpid()}")

# %% [markdown]
# `run` is a record of the launch. `run.results[r]` is what the function returned on rank r, and `run.traffic[r]` what
# rank r sent and received.
#
# (In a script of your own you would write `dist.init_process_group(...)` at the beginning and start it N times with
# `torchrun --nproc-per-node=N script.py`. `launch` does the same from a notebook's cell. The functions that you write
# here run unchanged under `torchrun`.)
#
# ### Who shares what
#
# Every rank below adds its own number to the entry of a dictionary that was made in the notebook. What does rank 3 find
# there: what ranks 0, 1 and 2 have added, or not? And what will the notebook find afterwards?

# %%
# NBVAL_CHECK_OUTPUT
shelf = {"number": 100}


def add_to_the_shelf():
    shelf["number"] += dist.get_rank()
    return shelf["number"]


run = launch(add_to_the_shelf, world_size=WORLD_SIZE, device=DEVICE)
print("on the ranks:   ", run.results)
print("in the notebook:", shelf["number"])

# %% [markdown]
# Every rank started from 100: each has a **copy** of the dictionary, in memory of its own, and nobody sees the others'.
# Processes share nothing. A number gets from one rank to another in one way only: somebody sends it, and the other one
# receives it.
#
# ## 2. A message
#
# - `dist.send(tensor, dst)` gives `tensor` to rank `dst` and **returns when that rank has received it**;
# - `dist.recv(tensor, src)` waits for a message from rank `src` and writes it **into** `tensor`. What it *returns* is
#   only the sender's rank, a number: write `dist.recv(tensor, src)`, not `tensor = dist.recv(tensor, src)`.
#
# Both sides must make their call, or the one that did will wait. (So it is on CPUs, with the backend called gloo. On
# GPUs, with NCCL, both only put the message into the GPU's queue, and the GPU waits instead of the Python code.)
#
# Here every rank fills a tensor with its own number, and rank 0 sends its tensor to rank 1. `device()` is the device of
# the rank that asks: its GPU, or the CPU.
#
# **Predict.** How many bytes is the message, if the tensor has 5 elements of type float32?

# %%
message_bytes = predict("bytes of a message of 5 float32", unit="bytes")


# %%
def one_message():
    rank = dist.get_rank()
    tensor = torch.full((5,), float(rank), device=device())
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    return tensor.tolist()


run = launch(one_message, world_size=WORLD_SIZE, device=DEVICE)
message_bytes.compare(run.traffic[0].sent)

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "rank": rank,
            "had": str([float(rank)] * 5),
            "has": str(run.results[rank]),
            "bytes sent": run.traffic[rank].sent,
            "bytes received": run.traffic[rank].received,
        }
        for rank in range(WORLD_SIZE)
    ]
)

# %% [markdown]
# What rank 1 had is overwritten. `recv` needs a tensor of the right number of elements and the right type, because a
# message is bytes and nothing else: it says neither what shape they have nor what they mean. Both sides must know.
#
# ### Everybody at once
#
# Now let every rank send its number to its right neighbour, rank (r + 1) % N, and receive from its left neighbour, rank
# (r - 1) % N. The `%` closes the line of ranks into a circle: the right neighbour of the last rank is rank 0.
#
# For that we need a send that does not stop to wait. `dist.isend` and `dist.irecv` ("i" for *immediate*) only start
# the message and return at once, with a handle. `handle.wait()` returns when the message is through.


# %%
def shift():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)], device=device())
    received = torch.empty(1, device=device())
    sending = dist.isend(mine, right)
    dist.recv(received, left)
    sending.wait()
    return int(received)


# %%
# NBVAL_CHECK_OUTPUT
run = launch(shift, world_size=WORLD_SIZE, device=DEVICE)
table(
    [
        {"rank": rank, "sent to": (rank + 1) % WORLD_SIZE, "received": run.results[rank]}
        for rank in range(WORLD_SIZE)
    ]
)

# %% [markdown]
# Between `isend` and `wait()` the message may leave at any moment, so one rule must be kept: **until `wait()` has
# returned, do not change a tensor that is being sent, and do not read one that is being received.** This function
# breaks it: it adds 100 to its number right after `isend`. Whether the message leaves before or after that is luck. The
# second run has `slow_ranks`: their messages leave as late as they may.


# %%
def hasty_shift():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)])
    received = torch.empty(1)
    sending = dist.isend(mine, right)
    mine += 100  # too early
    dist.recv(received, left)
    sending.wait()
    return int(received)


run = launch(hasty_shift, world_size=WORLD_SIZE, device="cpu")
print("as fast as this machine is:", run.results)
run = launch(hasty_shift, world_size=WORLD_SIZE, device="cpu", slow_ranks=range(WORLD_SIZE))
print("as late as allowed:        ", run.results)

# %% [markdown]
# In the first run it may be that all numbers are right, or some, or none. The function is wrong all the same. A mistake
# that shows now and then is the worst kind, so all checks of this course try your code with late messages too.
#
# ## 3. Break it on purpose: a deadlock
#
# Why not simply `send` and then `recv`, on every rank? Because `send` waits for its receiver. Think of four people in a
# circle who each hold out a parcel with both hands, and take one only when theirs is gone.
#
# Run the cell. Nothing hangs: `launch` watches what every rank waits for, finds the circle, ends the ranks and reports.


# %%
def everybody_sends_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)])
    received = torch.empty(1)
    dist.send(mine, right)
    dist.recv(received, left)


deadlock = None
try:
    launch(everybody_sends_first, world_size=WORLD_SIZE, device="cpu")
except LaunchError as report:
    deadlock = report
print(deadlock)

# %% [markdown]
# Read the report from the top: who waits for whom, in which call, on which line. The same as a picture, where an arrow
# points from each rank to the one it waits for:

# %% tags=["picture"]
deadlock.why()

# %% [markdown]
# A deadlock is always such a circle, or a wait for somebody who will never come. There are two ways out: start the
# send with `isend` and receive while it is under way, as in `shift`, or let at least one rank receive first.
#
# Outside this course nobody draws you a picture. A program in a deadlock just stands still, until a time-out ends it:
# by default after 30 minutes with gloo and 10 minutes with NCCL.
#
# ## 4. Pass the token
#
# The simplest thing that needs all ranks: a **token** that travels round the circle once. Rank 0 has it at first. Each
# rank adds something of its own and passes it on, and at last the token comes home to rank 0 and has met everybody.
#
# ```text
#        rank 0 ------> rank 1
#          ^              |
#          |              v
#        rank 3 <------ rank 2
# ```
#
# ### Exercise 00.pass_the_token
#
# *Difficulty: easy. Importance: high, every later exercise has this shape. Give it 15 minutes.*
#
# **Contract.** `token` and `mine` are contiguous one-dimensional tensors, of the same size and type on all ranks. On
# entry `token` on rank 0 is the token; on the other ranks it is garbage, a place to receive into. The token travels
# once, from rank 0 to 1, 2, ..., N-1, and back to 0. Each rank adds its `mine` before it passes the token on; rank 0
# does so at the start, and not again when the token comes home. All of it happens **in place**, in the tensor that was
# handed in. Afterwards rank r > 0 has in `token` the token plus the parts of ranks 0 to r, and rank 0 has the token
# plus all parts. Each rank sends one message and receives one. With N = 1 there is no message: `token` becomes `token +
# mine`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which rank can do something useful right away? All the others must begin by waiting for a message. So there are two
# cases, and they differ in the order of three things: receive, add, send.
# </details>
#
# <details><summary>Hint 2: the two orders</summary>
#
# Ranks 1 to N-1: receive from the left, add, send to the right. Rank 0: add, send to the right, receive from the left.
# "Add, send to the right" is common to both.
# </details>
#
# <details><summary>Hint 3: in place</summary>
#
# `token += mine` changes the tensor. `token = token + mine` makes a new one and gives it the name: whoever called your
# function still has the old one. And a rank that is alone has no neighbour: look at `world_size` before you send.
# </details>
#
# <details><summary>Hint 4: almost the answer</summary>
#
# ```python
# if rank > 0:
#     dist.recv(...)
# token += mine
# if world_size > 1:
#     dist.send(...)
#     if rank == 0:
#         ...
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "pass_the_token", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def pass_the_token(token, mine):
    """Sends `token` once round the ranks, 0 -> 1 -> ... -> 0; each adds its `mine`, in place.

    token, mine: 1-D, contiguous, of the same size and dtype on all ranks. `token` of rank 0 is
    the token. Afterwards rank r > 0 has the token plus the parts of ranks 0 to r, rank 0 the
    token plus all parts. One message a rank, of n bytes.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if rank > 0:
        dist.recv(token, left)
    token += mine
    if world_size > 1:
        dist.send(token, right)
        if rank == 0:
            dist.recv(token, left)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-pass_the_token", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("00.pass_the_token", pass_the_token)

# %% [markdown]
# **Predict.** The token starts at 0, and rank r adds r + 1. What does rank 0 have in the end? And how many messages are
# sent in all?

# %%
token_at_home = predict("the token on rank 0, at the end", N=WORLD_SIZE)

# %%
token_messages = predict("messages that all ranks send together, one lap", N=WORLD_SIZE)


# %%
def one_lap():
    token = torch.zeros(1, device=device())
    pass_the_token(token, torch.full((1,), dist.get_rank() + 1.0, device=device()))
    return int(token)


run = launch(one_lap, world_size=WORLD_SIZE, device=DEVICE)
token_at_home.compare(run.results[0])

# %%
token_messages.compare(sum(rank.messages_sent for rank in run.traffic))

# %%
# NBVAL_CHECK_OUTPUT
sums = [WORLD_SIZE * (WORLD_SIZE + 1) // 2]  # 1 + 2 + ... + N on rank 0
sums += [(rank + 1) * (rank + 2) // 2 for rank in range(1, WORLD_SIZE)]  # 1 + 2 + ... + (r + 1)
table(
    [
        {"rank": rank, "predicted": sums[rank], "token": run.results[rank]}
        for rank in range(WORLD_SIZE)
    ],
    equal=("predicted", "token"),
)

# %% [markdown]
# One message on each of the N links of the circle. But look at the time: no two of these messages can be under way at
# once, since each waits for the one before. N messages take N **rounds**, and in each round all ranks but two do
# nothing. The shift of section 2 also sent N messages, all of them in one round. When you count what something costs,
# count both: how much is sent, and how much of it happens side by side.
#
# ## 5. Seven operations for everybody
#
# Some patterns are needed so often that they have names. They are called **collectives**, because every rank of the
# group takes part: all of them call the same function, in the same order.
#
# You will try each of them. `trace_collective(fn, ...)` runs `fn(mine)` on every rank, on data that says where it came
# from, and records what the rank had and what `fn` returned. In the picture **a row is a rank and a column a piece of
# its tensor**; a block in a rank's colour says that this rank's data is in the piece. A tick says that the piece holds
# what the operation promises.
#
# Four of the seven have a **root**, one rank that gives or receives. It can be any rank. Here it is rank 1, so that
# nobody takes rank 0 for something special.
#
# **Broadcast**: everybody gets the root's tensor. With it all copies of a model start from the same weights.

# %%
ROOT = 1


def try_broadcast(mine):
    dist.broadcast(mine, src=ROOT)
    return mine


show(trace_collective(try_broadcast, "broadcast", WORLD_SIZE, root=ROOT))

# %% [markdown]
# **Reduce**: the root gets the sum of all tensors. (Or the largest, the smallest, the product: `op=` says which. Sum is
# the one that training needs, and the default.)


# %%
def try_reduce(mine):
    dist.reduce(mine, dst=ROOT)
    return mine


show(trace_collective(try_reduce, "reduce", WORLD_SIZE, root=ROOT))

# %% [markdown]
# Look at the other rows. Their tensors have changed too: they hold sums of some ranks' data, left over from the way in
# which the sum was made. Nothing is promised about them. Code that reads them works by accident.
#
# **All-reduce**: *everybody* gets the sum. This is the operation of data-parallel training: it adds up the gradients
# that the ranks have computed on their parts of the batch. You will build it in lab 04.


# %%
def try_all_reduce(mine):
    dist.all_reduce(mine)
    return mine


show(trace_collective(try_all_reduce, "all_reduce", WORLD_SIZE))

# %% [markdown]
# The other four deal with pieces. **Gather**: each rank has one piece, and the root gets all of them, in the order of
# the ranks.


# %%
def try_gather(mine):
    pieces = None
    if dist.get_rank() == ROOT:
        pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.gather(mine, pieces, dst=ROOT)
    return pieces


show(trace_collective(try_gather, "gather", WORLD_SIZE, root=ROOT))

# %% [markdown]
# **Scatter** is the reverse: the root has N pieces and deals them out, piece r to rank r.


# %%
def try_scatter(mine):
    pieces = list(mine.split(1)) if dist.get_rank() == ROOT else None
    received = mine.new_empty(1)
    dist.scatter(received, pieces, src=ROOT)
    return received


show(trace_collective(try_scatter, "scatter", WORLD_SIZE, root=ROOT))

# %% [markdown]
# **All-gather**: each rank has one piece, and *everybody* gets all of them. A model whose parameters are spread over
# the ranks is put together like this just before it is used (lab 08).


# %%
def try_all_gather(mine):
    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, mine)
    return pieces


show(trace_collective(try_all_gather, "all_gather", WORLD_SIZE))

# %% [markdown]
# **Reduce-scatter**: everybody has N pieces; piece r of all ranks is added up, and the sum goes to rank r.
#
# **Predict** before you run it: of the N x N cells in the right half of the picture, how many will hold a complete sum?

# %%
complete_pieces = predict(
    "complete pieces after a reduce-scatter, all ranks together", N=WORLD_SIZE
)


# %%
def try_reduce_scatter(mine):
    received = mine.new_empty(1)
    dist.reduce_scatter(received, list(mine.split(1)))
    return received


reduce_scatter = trace_collective(try_reduce_scatter, "reduce_scatter", WORLD_SIZE)
show(reduce_scatter)

# %%
everybody = (1,) * WORLD_SIZE  # each rank's data, once
complete_pieces.compare(sum(row.count(everybody) for row in reduce_scatter.after))

# %% [markdown]
# One on each rank: the sum exists, but in pieces, and no piece twice. It is the least known of the seven and the heart
# of ZeRO (labs 06 to 08): a rank that keeps one N-th of the optimizer's state needs one N-th of the gradients' sum, and
# this is how it gets exactly that.
#
# A picture is only worth something if a mistake looks like one. Here somebody wants an all-reduce and calls `reduce`:


# %%
def reduce_instead(mine):
    dist.reduce(mine, dst=0)
    return mine


show(trace_collective(reduce_instead, "all_reduce", WORLD_SIZE))

# %% [markdown]
# ### They are made of each other
#
# Compare the pictures. After a reduce-scatter the sum is there, one piece on each rank. An all-gather starts from one
# piece on each rank and gives everybody all of them. So
#
# $$\text{all-reduce} = \text{reduce-scatter, then all-gather} = \text{reduce, then broadcast}.$$
#
# With numbers (whole ones, so that no rounding gets in the way):


# %%
def three_ways():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(SEED + rank)  # different numbers on every rank
    mine = torch.randint(0, 10, (world_size,), generator=generator).float()

    at_once = mine.clone()
    dist.all_reduce(at_once)

    piece = torch.empty(1)
    dist.reduce_scatter(piece, list(mine.split(1)))
    pieces = [torch.empty(1) for _ in range(world_size)]
    dist.all_gather(pieces, piece)

    by_the_root = mine.clone()
    dist.reduce(by_the_root, dst=ROOT)
    dist.broadcast(by_the_root, src=ROOT)
    return [tensor.int().tolist() for tensor in (mine, at_once, torch.cat(pieces), by_the_root)]


run = launch(three_ways, world_size=WORLD_SIZE, device="cpu")

# %%
# NBVAL_CHECK_OUTPUT
columns = ("had", "all-reduce", "reduce-scatter, all-gather", "reduce, broadcast")
table(
    [
        (rank, *(str(numbers) for numbers in results), results[1] == results[2] == results[3])
        for rank, results in enumerate(run.results)
    ],
    ("rank", *columns, "the same"),
)

# %% [markdown]
# Equal in what they give, not in what they cost. That comes next.
#
# ### What they cost
#
# Let n be the size of the full tensor: what a rank has before a broadcast, a reduce, an all-reduce or a reduce-scatter,
# and all N pieces together for the other three. A rank cannot know what it has not received, so one can count:
#
# - **All-gather.** A rank lacks N-1 pieces of n/N bytes, so it must receive (N-1)/N n. If all ranks share the work
#   evenly, each also sends that much.
# - **Reduce-scatter** is an all-gather run backwards: instead of one piece going out to N-1 ranks, N-1 ranks' numbers
#   come in to one piece, and are added on the way. The same (N-1)/N n.
# - **All-reduce** is both, one after the other: 2(N-1)/N n.
# - **Broadcast.** Each of the N-1 other ranks must receive n. If every rank that has it passes it on to one other,
#   nobody sends more than n. A **reduce** is a broadcast run backwards: n.
# - **Scatter.** All comes from the root: it sends N-1 pieces, (N-1)/N n. In a **gather** every other rank sends one
#   piece, n/N, and the root receives (N-1)/N n.
#
# `theory.collective_cost` has these formulas. Beside it, what the meter of `launch` has booked for a run:

# %%
# NBVAL_CHECK_OUTPUT
LENGTH = 300_000 // WORLD_SIZE * WORLD_SIZE  # float32 elements, in N equal pieces: n = 1.2 MB


def all_seven():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = torch.ones(LENGTH)
    pieces = list(full.tensor_split(world_size))
    piece = pieces[rank].clone()
    dist.broadcast(full, src=ROOT)
    dist.reduce(full, dst=ROOT)
    dist.all_reduce(full)
    dist.gather(piece, pieces if rank == ROOT else None, dst=ROOT)
    dist.scatter(piece, pieces if rank == ROOT else None, src=ROOT)
    dist.all_gather(pieces, piece)
    dist.reduce_scatter(piece, pieces)


run = launch(all_seven, world_size=WORLD_SIZE, device="cpu")
operations = list(run.traffic[0].by_operation)  # in the order of the calls
costs = {
    name: [
        theory.collective_cost(name, 4 * LENGTH, WORLD_SIZE, rank, ROOT)
        for rank in range(WORLD_SIZE)
    ]
    for name in operations
}
table(
    [
        {
            "operation": name.replace("_", "-"),
            "busiest rank sends, predicted": max(cost.sent for cost in costs[name]),
            "booked": max(rank.by_operation[name].sent for rank in run.traffic),
            "all ranks send, predicted": sum(cost.sent for cost in costs[name]),
            "all booked": sum(rank.by_operation[name].sent for rank in run.traffic),
        }
        for name in operations
    ],
    equal=("busiest rank sends, predicted", "booked"),
    title=f"n = {4 * LENGTH:,} bytes, N = {WORLD_SIZE}",
)

# %% [markdown]
# Compare the two ways to an all-reduce. Reduce and broadcast make the busiest rank send 2n; reduce-scatter and
# all-gather make it send 2(N-1)/N n, as the all-reduce does. In all the ranks send the same, 2(N-1) n: the second way
# only spreads it evenly. Lab 04 is about nothing else.
#
# **Honestly:** the equality in this table proves little. A library does not tell what it really sends, so for its
# collectives the meter *books* the published cost of the best algorithm, which is the same formula. It knows which
# operations you called, how often and on how many bytes. A message of your own, sent with `send` or `isend`, is
# *measured*: counted one by one. That is one reason to build these operations by hand, which is what you do now.
#
# ## 6. A broadcast from messages
#
# Worked example: a **chain**. The root sends to its right neighbour, which passes it on, and so on until everybody has
# it. Numbers are counted from the root: `me` is 0 on the root, 1 on the rank to its right, N-1 on the last one.


# %%
def chain_broadcast(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    me = (rank - root) % world_size
    if me > 0:
        dist.recv(tensor, (rank - 1) % world_size)
    if me < world_size - 1:
        dist.send(tensor, (rank + 1) % world_size)


# %% [markdown]
# The other obvious way is a **star**: the root sends to everybody, one after the other.


# %%
def star_broadcast(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for other in range(world_size):
            if other != root:
                dist.send(tensor, other)
    else:
        dist.recv(tensor, root)


# %% [markdown]
# Both send N-1 messages: every rank but the root receives once, and fewer cannot do. What differs is who is busy when.
# To count **rounds**, look at the order of calls, not at the clock. A rank cannot pass on what it has not got, and it
# sends one message after the other. So the round of a message is one more than the later of two others:
#
# - the round in which its sender got the data (0 for the root),
# - the round of its sender's previous message (0 if there is none).
#
# `broadcast_rounds(run.calls, root)` does this count on the record of a run.
#
# **Predict.** How many rounds does a chain take with 8 ranks, and how many a star?

# %%
chain_rounds = predict("rounds of a chain, 8 ranks", N=8)

# %%
star_rounds = predict("rounds of a star, 8 ranks", N=8)


# %%
def broadcast_once(broadcast, root, numel=1):
    """Runs on every rank: broadcasts the root's tensor, and returns its first and last number."""
    tensor = torch.full((numel,), float(dist.get_rank()), device=device())
    broadcast(tensor, root)
    return tensor[0].item(), tensor[-1].item()


def print_rounds(run, root):
    for number, messages in enumerate(broadcast_rounds(run.calls, root), start=1):
        arrows = ",  ".join(f"{source} -> {target}" for source, target in messages)
        print(f"  round {number}: {arrows}")


chain = launch(broadcast_once, world_size=8, args=(chain_broadcast, ROOT), device="cpu")
star = launch(broadcast_once, world_size=8, args=(star_broadcast, ROOT), device="cpu")
print("chain: everybody has", {first for first, _ in chain.results})
print_rounds(chain, ROOT)
print("star: everybody has", {first for first, _ in star.results})
print_rounds(star, ROOT)

# %%
chain_rounds.compare(len(broadcast_rounds(chain.calls, ROOT)))

# %%
star_rounds.compare(len(broadcast_rounds(star.calls, ROOT)))

# %% [markdown]
# In every round one rank sends, and all the others that have the data already stand by. In the chain those who have
# passed it on never do anything again; in the star the receivers never do anything at all.
#
# **Predict.** Suppose that every rank that has the data helps to pass it on, in every round. How few rounds could it
# take with 8 ranks?

# %%
tree_rounds = predict("fewest rounds when everybody helps, 8 ranks", N=8)

# %% [markdown]
# ### Everybody helps
#
# A rank that has the data can send it in the next round, and so can the root. After round 1 two ranks have it. Both
# send in round 2: then four have it. Then eight. The number doubles in every round, so N ranks are reached in
#
# $$\lceil \log_2 N \rceil$$
#
# rounds (the brackets round up). Nobody can do better: in a round each rank that has the data gives it to one more at
# most, so the number of those who have it cannot more than double. Draw the messages as arrows and you see a **tree**
# that grows from the root. For 1,000 ranks it takes 10 rounds, where a chain takes 999.
#
# ### Exercise 00.broadcast
#
# *Difficulty: medium. Importance: medium; you learn to think in rounds. Give it 25 minutes.*
#
# **Contract.** `tensor` has the same shape and type on all ranks: any shape, any type, contiguous. `root` is any rank.
# When the function returns, `tensor` on every rank holds what it held on the root, in place. Use `send`, `recv`,
# `isend` and `irecv` only. N-1 messages in all: every rank but the root receives exactly one, the whole tensor. No more
# than $\lceil \log_2 N \rceil$ rounds, for any N, also one that is no power of two. Which rank sends to which is up to
# you. With N = 1 there is nothing to do.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Forget the root at first: let it be rank 0, and N = 8. Write down which ranks have the data after rounds 1, 2 and 3,
# such that they are always the *lowest* numbers. Who sends to whom in round 2? In round 3?
# </details>
#
# <details><summary>Hint 2: any root, any N</summary>
#
# Count from the root: `me = (rank - root) % world_size`. Then the root is always number 0. A number is turned back into
# a rank by `(number + root) % world_size`. If N is no power of two, some partners in the last round do not exist:
# number `me + distance` exists only if it is less than `world_size`.
# </details>
#
# <details><summary>Hint 3: who does what in a round</summary>
#
# Let `distance` be 1, 2, 4, ... in rounds 1, 2, 3, ... Before the round, numbers 0 to distance - 1 have the data.
# Number `me < distance` sends to number `me + distance`, if there is one. Number `me` with
# `distance <= me < 2 * distance` receives from number `me - distance`. Everybody else has nothing to do in this round.
# </details>
#
# <details><summary>Hint 4: almost the answer</summary>
#
# ```python
# me = (rank - root) % world_size
# distance = 1
# while distance < world_size:
#     if me < distance:
#         if ...:
#             dist.send(tensor, (rank + distance) % world_size)
#     elif ...:
#         dist.recv(tensor, ...)
#     distance *= 2
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "broadcast", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def broadcast(tensor, root):
    """Copies `tensor` of rank `root` into `tensor` of every other rank, in place.

    tensor: any shape and dtype, contiguous, alike on all ranks. N-1 messages of n bytes in
    ceil(log2 N) rounds (Thakur et al. 2005, section 4.2).
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    me = (rank - root) % world_size  # counted from the root
    distance = 1  # numbers 0 to distance - 1 have the data
    while distance < world_size:
        if me < distance:
            if me + distance < world_size:
                dist.send(tensor, (rank + distance) % world_size)
        elif me < 2 * distance:
            dist.recv(tensor, (rank - distance) % world_size)
        distance *= 2
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-broadcast", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("00.broadcast", broadcast)

# %% [markdown]
# Your own tree, round by round:

# %%
tree = launch(broadcast_once, world_size=8, args=(broadcast, ROOT), device="cpu")
print("tree: everybody has", {first for first, _ in tree.results})
print_rounds(tree, ROOT)

# %%
tree_rounds.compare(len(broadcast_rounds(tree.calls, ROOT)))

# %% [markdown]
# And all three at several N, counted from real runs:

# %%
# NBVAL_CHECK_OUTPUT
WORLD_SIZES = range(2, 9)
ways = {"chain": chain_broadcast, "star": star_broadcast, "tree": broadcast}
runs = {
    (name, N): launch(broadcast_once, world_size=N, args=(way, 0, 250), device="cpu")
    for name, way in ways.items()
    for N in WORLD_SIZES
}
rounds = {key: len(broadcast_rounds(run.calls, 0)) for key, run in runs.items()}
table(
    [
        {
            "N": N,
            "chain": rounds["chain", N],
            "star": rounds["star", N],
            "N-1": N - 1,
            "tree, predicted": theory.tree_rounds(N),
            "tree, rounds": rounds["tree", N],
            "messages of the tree": sum(rank.messages_sent for rank in runs["tree", N].traffic),
        }
        for N in WORLD_SIZES
    ],
    equal=("tree, predicted", "tree, rounds"),
    title="rounds of a broadcast",
)

# %%
charts.steps_against(
    list(WORLD_SIZES),
    {name: [rounds[name, N] for N in WORLD_SIZES] for name in ("chain", "tree")},
    xlabel="ranks",
    ylabel="rounds",
    title="the star lies on the chain",
)

# %% [markdown]
# ### What the tree pays
#
# Fewer rounds, and as many messages. Is the tree better in everything, then? Count what the **busiest** rank sends:

# %%
# NBVAL_CHECK_OUTPUT
library = {
    N: launch(broadcast_once, world_size=N, args=(dist.broadcast, 0, 250), device="cpu")
    for N in (2, 4, 8)
}
busiest = {key: max(rank.sent for rank in run.traffic) for key, run in runs.items()}
table(
    [
        {
            "N": N,
            "chain": busiest["chain", N],
            "star": busiest["star", N],
            "tree": busiest["tree", N],
            "dist.broadcast (booked)": max(rank.sent for rank in library[N].traffic),
        }
        for N in library
    ],
    title="bytes sent by the busiest rank, n = 1,000 bytes",
)

# %% [markdown]
# A chain loads each link with n bytes and no more. In the tree the root sends in every round, $\lceil \log_2 N \rceil$
# n in all. For a large tensor that decides, because a chain can be **pipelined**: cut the tensor into p pieces, and a
# rank passes on the first piece while it receives the second. The last piece leaves the root in round p and needs N-2
# more rounds to the end of the chain: p + N - 2 rounds of n/p bytes.
#
# Put numbers to it with the simplest model of time (lab 04 measures it): a message of b bytes takes $\alpha + \beta b$
# seconds, alpha for being a message at all, beta for every byte. Nothing is measured in this table: it is arithmetic,
# for 64 ranks, alpha = 10 microseconds and 10 GB per second.

# %%
# NBVAL_CHECK_OUTPUT
ALPHA, BETA, RANKS, PIECES = 10e-6, 1 / 10e9, 64, 200


def milliseconds(rounds, nbytes):
    return 1e3 * rounds * theory.message_time(nbytes, ALPHA, BETA)


table(
    [
        {
            "n in bytes": nbytes,
            "chain (ms)": milliseconds(RANKS - 1, nbytes),
            "tree (ms)": milliseconds(theory.tree_rounds(RANKS), nbytes),
            f"chain in {PIECES} pieces (ms)": milliseconds(PIECES + RANKS - 2, nbytes / PIECES),
        }
        for nbytes in (1_000, 1_000_000, 1_000_000_000)
    ],
    title=f"model: N = {RANKS}, alpha = 10 us, 1/beta = 10 GB/s",
)

# %% [markdown]
# Small tensors want few rounds: the tree wins. Large tensors want every link busy with n bytes and no more: the chain
# in pieces wins. Libraries have both and choose by size, and the meter books the second, n. Keep the question in mind,
# rounds or bytes: lab 04 asks it again for the all-reduce, and lab 05 for gradients.
#
# ## 7. Break it on purpose: three more reports
#
# **A collective that not everybody calls.** Somebody wants one number from rank 0 only, and puts the whole thing inside
# an `if`. Rank 0 calls, and waits for the others, who have long finished.


# %%
def only_rank_0_calls():
    loss = torch.tensor([0.5])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        return loss.item()


try:
    launch(only_rank_0_calls, world_size=WORLD_SIZE, device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# **Ranks that disagree on the order.** Two different collectives on tensors of the same size, and the last rank calls
# them the other way round. What would you expect: an error, a hang, or wrong numbers?


# %%
def two_orders():
    gradient, weight = torch.ones(3), torch.ones(3)
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.all_reduce(gradient)
        dist.broadcast(weight, src=0)
    else:
        dist.broadcast(weight, src=0)
        dist.all_reduce(gradient)


try:
    launch(two_orders, world_size=WORLD_SIZE, device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# `launch` compares what the ranks call, and sees that these are two different operations. gloo by itself says nothing:
# here it would stand still until its time-out. That is the lucky case, because at least you notice.
#
# **The same operation, in two orders.** Now every rank sums two tensors: one of ones, and one of tens. The sums are N
# and 10 N. Again the last rank takes them the other way round.
#
# **Predict.** An error, a hang, or a number: what does rank 0 have in the first sum?

# %%
first_sum = predict("the sum of the ones on rank 0, if it gets a number at all", N=WORLD_SIZE)


# %%
# NBVAL_CHECK_OUTPUT
def two_sums():
    ones, tens = torch.full((3,), 1.0), torch.full((3,), 10.0)
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.all_reduce(ones)
        dist.all_reduce(tens)
    else:
        dist.all_reduce(tens)
        dist.all_reduce(ones)
    return int(ones[0]), int(tens[0])


run = launch(two_sums, world_size=WORLD_SIZE, device="cpu")
table(
    [
        {
            "rank": rank,
            "ones, right": WORLD_SIZE,
            "ones, got": run.results[rank][0],
            "tens, right": 10 * WORLD_SIZE,
            "tens, got": run.results[rank][1],
        }
        for rank in range(WORLD_SIZE)
    ]
)

# %%
first_sum.compare(run.results[0][0])

# %% [markdown]
# No error, no hang, no report, not even from `launch`: every number is wrong. All ranks called an all-reduce of 3
# float32, twice, and nothing in a call says *which* tensor is meant. Calls are matched by their order alone, so the last
# rank's tens were added to the others' ones: (N - 1) 1 + 10 = N + 9 instead of N. If these are the gradients of two
# layers of the same size, the training goes on with wrong numbers. That is what "in the same order" in section 5 is
# about.
#
# **A rank that dies.** Here the last rank is killed, as the system does when memory runs out, while the others wait for
# it in an all-reduce.


# %%
def last_rank_dies():
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


try:
    launch(last_rank_dies, world_size=WORLD_SIZE, device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# The rank that died cannot say anything, and the others only notice that a connection is gone. In a log of a real
# training you often see *their* errors, many times over, and have to look for the one rank that is silent. The first to
# fall is the one to ask.
#
# ## 8. What production systems do differently
#
# - **MPI** has had ranks, `send`, `recv` and all these collectives since 1994, under the names that PyTorch uses.
#   **NCCL** is NVIDIA's library for GPUs: its collectives are GPU kernels that copy straight from GPU to GPU. gloo,
#   which you used here if you have no GPUs, does the same for CPUs.
# - **Starting.** `torchrun` starts the processes of a machine, tells each its rank by environment variables, and ends
#   all of them when one dies. With `--max-restarts=k` it then starts them again, up to k times; the default is 0.
# - **Several groups.** A rank can belong to several process groups (`dist.new_group`), for example one for each
#   machine. A collective concerns the ranks of its group only.
# - **Finding the culprit.** PyTorch can keep the last calls of every rank (its "flight recorder") and compare them when
#   a time-out strikes. It is the same idea as the reports above.
# - **Names change.** You will also meet `all_gather_into_tensor`, `reduce_scatter_tensor` and, in newer versions,
#   `all_gather_single` and `reduce_scatter_single`: the same operations on one large tensor instead of a list of
#   pieces.
#
# ## 9. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** In `shift`, `dist.recv` stands between `isend` and `sending.wait()`. Somebody moves `sending.wait()` up, right
# behind `isend`. What happens, and why?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-wait-early", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# A deadlock: `isend` followed at once by `wait()` is the same as `send`. Every rank waits until its message is
# received, and nobody gets to its `recv`.

# %% [markdown]
# **Q2.** `pass_the_token` uses only blocking calls and every rank both sends and receives. Why does it not deadlock?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-token", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Rank 0 sends first, all others receive first, so the waits form a line with an end and not a circle: rank 1 receives,
# and that frees rank 0; rank 1 sends, and that frees rank 2, and so on. By the time rank N-1 sends to rank 0, rank 0
# has finished its send and receives.

# %% [markdown]
# **Q3.** A model of 4 GB is broadcast to 1,000 ranks. How many messages does a tree send, in how many rounds, and how
# many bytes does the root send? How many would a pipelined chain make it send?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-tree", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 999 messages in ceil(log2 1000) = 10 rounds, and the root sends in each of them: 40 GB. In a pipelined chain it sends
# 4 GB.

# %% [markdown]
# **Q4.** Rank 2 needs the largest loss of all ranks, for a message on the screen. Which of the seven operations is the
# right one, and what is wrong with `if dist.get_rank() == 2: dist.reduce(loss, dst=2, op=dist.ReduceOp.MAX)`?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-reduce", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# A reduce with `op=MAX` to rank 2 is right. But it is a collective: all ranks must call it, not only the one that gets
# the result, or rank 2 waits for ever. Only the printing belongs inside the `if`. (And on the other ranks `loss` may
# hold anything afterwards.)

# %% [markdown]
# ## 10. Where this goes
#
# - **Lab 01** stays in one process and finds out what a training keeps in memory, to the byte: the 16 bytes per
#   parameter.
# - **Lab 02** uses several devices from *one* process, scatters and gathers by hand, and meets a bottleneck: device 0.
# - **Lab 03** gives every device its own process: broadcast the weights, all-reduce the gradients. N processes then
#   train exactly as one would with the whole batch.
# - **Lab 04** builds the all-reduce itself, from messages between neighbours, with nobody busier than the others.
#
# ## Sources
#
# - PyTorch documentation, *Distributed communication package - torch.distributed*: the operations, and the default
#   time-outs (`init_process_group`).
# - MPI Forum: *MPI: A Message-Passing Interface Standard*: chapters "Point-to-Point Communication" and "Collective
#   Communication". A figure of the latter draws four of the seven (broadcast, scatter, gather, all-gather) as rows and
#   columns, as here.
# - R. Thakur, R. Rabenseifner, W. Gropp: *Optimization of collective communication operations in MPICH*, IJHPCA 19(1),
#   2005, section 3 (the model of time) and 4.2 (broadcast by trees and by pieces).
# - `doc/PERFORMANCE.md` of NVIDIA's nccl-tests: what each collective must send.

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
# # 03 - DDP: many processes, one model
#
# **You build:** `broadcast_parameters`, `average_gradients`, `average_gradients_flat` and `shard_indices`. Together they
# are distributed data parallel, DDP. **Time:** 75 to 90 minutes.
#
# **Where this stands.** In lab 02 one process drove all devices, with a thread for each. It worked, and it had two
# bottlenecks. All threads of a Python process share one lock, the GIL, so they took turns where they should have worked
# side by side. And device 0 did what nobody else did: every step it sent the parameters to N-1 others, collected N-1
# sets of gradients, and ran the optimizer alone while the others waited.
#
# Now every device gets **a process of its own**: its own Python, its own GIL, its own copy of the model, its own
# optimizer. No process is special. But processes share no memory, so a new question appears: who keeps the copies of
# the model equal?
#
# At the end of this notebook N processes train one GPT on your four functions. You will have proved that they compute
# what one process with the whole batch computes, measured how exactly, and watched the copies drift apart when any one
# ingredient is missing.
#
# **Letters.** N is the number of ranks. $\psi$ is the number of parameters of the model. $w$ are the weights, $g$ the
# gradient. An **epoch** is one pass over all data.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
STEPS = 240  # of the training run in section 6

# %% tags=["export"]
import torch
import torch.distributed as dist

# %%
import time

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from shardlab import check, device, launch, predict, reuse, table, theory
from shardlab.errors import LaunchError
from shardlab.fingerprint import fingerprint, largest_difference
from shardlab.ledger import LedgerRow, record
from shardlab.model import GPT, SMALL, Size, loss_function
from shardlab.text import batch, decode, encode
from shardlab.widgets import charts
from shardlab.widgets.curves import curves
from shardlab.widgets.svg import as_svg

PASSAGES, LENGTH = 24, 32  # the course's batch: 24 passages of 32 characters
PARAMETERS = [parameter.numel() for parameter in GPT(SMALL).parameters()]  # elements of each
PSI = sum(PARAMETERS)

# %% [markdown]
# ## 1. The one idea
#
# A training step computes new weights from the old ones and a gradient: $w_{t+1} = U(w_t, g_t)$, where $U$ is the
# optimizer. $U$ is an ordinary function: the same inputs give the same output, bit for bit, on every rank. (The
# optimizer's own state, such as Adam's moments, is computed from the gradients in the same way, so it belongs to $w$
# here.)
#
# So look at two ranks. **If they start with the same weights, and apply the same gradient in each step, they have the
# same weights for ever.** After step 0 because $w_0$ and $g_0$ were the same, after step 1 because then $w_1$ and $g_1$
# were, and so on. Nobody ever has to send a weight again. Lab 02 sent all of them every step.
#
# That leaves three things to provide:
#
# 1. the **same start**: once, at the beginning, everybody takes over rank 0's weights;
# 2. **different data**: each rank works on its own part of the batch, else N ranks do the work of one;
# 3. the **same gradient**: the ranks average their gradients, every step, before the optimizer steps.
#
# ### An instrument: the fingerprint
#
# "Equal" should be something we can see. `fingerprint(model)` is a hash over every bit of all weights, in eight digits.
# It costs nothing to send, and one flipped bit gives another one. Here N ranks build a GPT, each from its own seed.


# %%
def build_and_look(seed):
    """Runs on every rank."""
    torch.manual_seed(seed + dist.get_rank())
    model = GPT(SMALL).to(device())
    return fingerprint(model), model.embedding.weight[0, 0].item()


run = launch(build_and_look, WORLD_SIZE, args=(SEED,), device=DEVICE)
table(
    [
        {"rank": rank, "fingerprint": print_, "first weight": first}
        for rank, (print_, first) in enumerate(run.results)
    ]
)

# %% [markdown]
# You may object that equal seeds would make them equal. They often do, until one rank draws a single random number more
# than the others before it builds the model, or loads a checkpoint that the others don't, or has another version of a
# library. Equal seeds are a hope. A broadcast is a guarantee. In all that follows, ranks are seeded differently on
# purpose.
#
# ## 2. The same start
#
# `dist.broadcast(tensor, src=0)` copies rank 0's tensor into everybody's tensor, in place. All ranks call it.
#
# What has to be copied? A model's state has two parts. **Parameters** are what is trained, or was trained and is now
# frozen (`requires_grad=False`). **Buffers** are numbers that belong to the model but get no gradient: a mask, a table
# of positions, the running mean and the running count of BatchNorm.
#
# ### Exercise 03.broadcast_parameters
#
# *Difficulty: easy, with a trap. Importance: high. Give it 10 minutes.*
#
# **Contract.** `module` is any model, with different values on every rank. When the function returns, all parameters
# (the frozen ones too) and all buffers (whole numbers too, and those that `state_dict()` leaves out) of every rank hold
# rank 0's values, in place. The parameters are still the same objects: an optimizer may hold them already.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Everybody makes the same calls in the same order. Who decides the order? Something that is alike on all ranks, such as
# the order in which the model lists its tensors.
# </details>
#
# <details><summary>Hint 2: where the tensors are</summary>
#
# `module.parameters()` and `module.buffers()` go through the inner modules too. `state_dict()` has most of these
# tensors, but not buffers that were registered with `persistent=False`.
# </details>
#
# <details><summary>Hint 3: numbers, not the graph</summary>
#
# A parameter requires gradients; the copy should not become part of a graph. `tensor.detach()` is the same memory
# without the graph: what is written into it is written into the parameter.
# </details>


# %% nbgrader={"grade": false, "grade_id": "broadcast_parameters", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def broadcast_parameters(module):
    """Copies rank 0's parameters and buffers to all ranks, in place. Every rank calls it, once.

    Sends all of the model once: by a chain, n bytes from each rank but the last.
    """
    ### BEGIN SOLUTION
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-broadcast_parameters", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("03.broadcast_parameters", broadcast_parameters)


# %%
def build_alike(seed):
    """The model with which every rank starts from here on."""
    torch.manual_seed(seed + dist.get_rank())
    model = GPT(SMALL).to(device())
    broadcast_parameters(model)
    return model


run = launch(
    lambda seed: fingerprint(build_alike(seed)), WORLD_SIZE, args=(SEED,), device=DEVICE
)
print("\n".join(f"rank {rank}: {digits}" for rank, digits in enumerate(run.results)))

# %% [markdown]
# All equal. What did it cost? The meter books a broadcast as a chain, rank 0 to rank 1 to rank 2 and so on: everybody
# passes on the whole model, except the last rank.

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "rank": rank.rank,
            "bytes predicted": theory.collective_cost(
                "broadcast", 4 * PSI, WORLD_SIZE, rank.rank
            ).sent,
            "bytes sent": int(rank.sent),
        }
        for rank in run.traffic
    ],
    equal=("bytes predicted", "bytes sent"),
    title=f"n = 4 psi = {4 * PSI:,} bytes, once in the whole training",
)

# %% [markdown]
# ## 3. The same gradient
#
# Let the batch have B samples, B/N on each rank, and let $\ell_i$ be the loss of sample i. One process with the whole
# batch minimises the mean $L = \frac1B \sum_i \ell_i$. Rank r computes the mean over its own part,
# $L_r = \frac{N}{B} \sum_{i \in r} \ell_i$. Add these up over the ranks and divide by N:
#
# $$\frac1N \sum_r L_r = \frac1N \cdot \frac NB \sum_r \sum_{i \in r} \ell_i = \frac1B \sum_i \ell_i = L .$$
#
# A gradient is linear, so the same holds for gradients: **the mean of the ranks' gradients is the gradient of the whole
# batch**. As long as all parts are equally large; section 8 deals with the rest.
#
# `dist.all_reduce(tensor)` replaces everybody's tensor by the sum over all ranks, in place. Lab 04 shows how it works
# inside. Here it is a building block, and it has one rule: all ranks call it equally often, in the same order, with
# tensors of the same size.
#
# ### Exercise 03.average_gradients
#
# *Difficulty: medium; the rule has a consequence. Importance: high. Give it 15 minutes.*
#
# **Contract.** Every parameter of `module` may have a `.grad`. When the function returns, `.grad` is the mean over the
# ranks, on every rank, with one `all_reduce` for each parameter. Besides:
#
# - a parameter that has no gradient (`None`) on some ranks counts as zeros there, and ends with the mean on **all**
#   ranks. If it has none anywhere, it ends as `None` or as zeros, alike on all ranks;
# - frozen parameters are left alone: their `.grad` stays `None`;
# - gradients have any shape (0-d, empty, a transposed matrix) and any dtype. The largest float16 is 65504: gradients of
#   40000 on every rank must not overflow.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Suppose rank 1 did not use some layer in this step, so its `.grad` is `None` there. What happens to the others if
# rank 1 skips that parameter's `all_reduce`?
# </details>
#
# <details><summary>Hint 2: take part with zeros</summary>
#
# `parameter.grad = torch.zeros_like(parameter)` before the call, and it takes part like any other. Whether to do so
# must not depend on anything that differs between ranks; `parameter.requires_grad` does not.
# </details>
#
# <details><summary>Hint 3: 40000 + 40000</summary>
#
# Divide before summing.
# </details>


# %% nbgrader={"grade": false, "grade_id": "average_gradients", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def average_gradients(module):
    """`.grad` of every trained parameter becomes the mean over the ranks, on every rank.

    One all-reduce per parameter: 2(N-1)/N n bytes in all, n being the bytes of the gradients.
    """
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-average_gradients", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("03.average_gradients", average_gradients)

# %% [markdown]
# **Predict.** How many `all_reduce` calls does one step of the GPT take? Its parameters are one matrix or vector each.
# There are the embedding and the positions, one matrix each. Each of the two blocks has two norms and four linear
# layers, all with a weight and a bias: one layer makes queries, keys and values together, one follows the attention,
# and two are the network. At the end come a norm like the others, and the head, which has no bias.

# %%
calls = predict("all_reduce calls in one step of the GPT")


# %%
def part_of(step, seed, where):
    """This rank's passages of a step's batch: every N-th one."""
    inputs, targets = batch(step, PASSAGES, LENGTH, seed)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine].to(where), targets[mine].to(where)


def one_backward(average, seed):
    """The gradients of one step, averaged; no optimizer."""
    torch.manual_seed(seed)  # alike on all ranks here, so that no broadcast is in the count
    model = GPT(SMALL).to(device())
    inputs, targets = part_of(0, seed, device())
    loss_function(model(inputs), targets).backward()
    average(model)


run = launch(one_backward, WORLD_SIZE, args=(average_gradients, SEED), device=DEVICE)
calls.compare(run.traffic[0].by_operation["all_reduce"].calls)

# %% [markdown]
# And the bytes: an all-reduce of n bytes makes every rank send 2(N-1)/N n (lab 04 derives it), and all gradients
# together have n = 4$\psi$ bytes in float32.

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "rank": rank.rank,
            "calls": rank.by_operation["all_reduce"].calls,
            "bytes predicted": theory.step_volume("ddp", PSI, WORLD_SIZE).sent * 4,
            "bytes sent": round(rank.sent),
            "DataParallel, device r": theory.step_volume("dp", PSI, WORLD_SIZE, rank.rank).sent
            * 4,
        }
        for rank in run.traffic
    ],
    equal=("bytes predicted", "bytes sent"),
    title=f"one step, psi = {PSI:,}",
)

# %% [markdown]
# The last column is lab 02. Its device 0 sends N-1 times the model; here nobody sends more than twice the model,
# however many ranks there are, and all ranks send alike.
#
# ### Break it on purpose: a layer that one rank does not use
#
# The model below has a second head that only rank 0 uses in this step, as a model with branches does, or a mixture of
# experts. And the averaging skips a parameter whose gradient is `None`. It looks reasonable.


# %%
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x, second):
        hidden = self.body(x)
        return self.second(hidden) if second else self.first(hidden)


def skips_what_is_none(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def one_rank_differs(average):
    model = TwoHeads().to(device())
    output = model(torch.ones(5, 4, device=device()), second=dist.get_rank() == 0)
    output.sum().backward()
    average(model)
    return model.second.weight.grad.abs().sum().item()


try:
    launch(one_rank_differs, WORLD_SIZE, args=(skips_what_is_none,), device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# The third call of rank 0 is for its second head, the third call of the others for their first. They meet. Nothing in
# the backend knows which parameter a tensor belongs to, and had the two heads been of one size, the sums would have
# been silently wrong. With zeros instead of a skipped call, all ranks agree:

# %%
run = launch(one_rank_differs, WORLD_SIZE, args=(average_gradients,), device=DEVICE)
print("the second head's gradient, summed up, by rank:", [round(one, 3) for one in run.results])

# %% [markdown]
# ## 4. Fewer calls: one flat buffer
#
# No way sends fewer bytes; lab 04 proves it. But the same bytes can go with fewer calls: copy all gradients into one
# vector, reduce that with a single call, and copy the result back. How much time does that save?
#
# A model for the time of one all-reduce of b bytes, as simple as possible: a fixed time $a$ for the call, and a time
# $\beta$ for every byte,
#
# $$t(b) = a + \beta\, b .$$
#
# We measure $t$ at several sizes and fit the two numbers. (Lab 04 takes $a$ apart: it is the latency of the 2(N-1)
# messages inside.)


# %%
def seconds_of(call, repeats):
    """The shortest of some repeats: whatever else the machine does can only make it slower."""
    shortest = float("inf")
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        if torch.cuda.is_available() and device().type == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def time_all_reduces(lengths, repeats=25):
    tensors = [torch.ones(numel, device=device()) for numel in lengths]
    return [
        seconds_of(lambda tensor=tensor: dist.all_reduce(tensor), repeats) for tensor in tensors
    ]


timed_lengths = [4**k for k in range(2, 10)]  # elements: 16 to 262,144
run = launch(time_all_reduces, WORLD_SIZE, args=(timed_lengths,), device=DEVICE, meter=False)
timed = [max(of_ranks) for of_ranks in zip(*run.results, strict=True)]  # all must be done
a, beta = theory.fit_alpha_beta(
    [(1, 4 * numel, seconds) for numel, seconds in zip(timed_lengths, timed, strict=True)]
)
print(
    f"a = {theory.format_seconds(a)} per call, beta = {theory.format_seconds(beta * 10**6)} per MB"
)
charts.alpha_beta_fit(
    [(4 * numel, seconds) for numel, seconds in zip(timed_lengths, timed, strict=True)],
    a,
    beta,
    title="time of one all-reduce",
    fixed="a",
)

# %% [markdown]
# With P parameter tensors and n bytes in all, the model says
#
# $$t_\text{per parameter} = P\,a + \beta\,n, \qquad t_\text{flat} = a + \beta\,n .$$
#
# The bytes cost the same; the flat way saves (P-1) times the fixed time.
#
# **Predict.** How many times as long does the way per parameter take? You have all the numbers: $a$ and $\beta$ from
# above, P is the number of calls you counted in section 3, and n = 4$\psi$ bytes stand in the table there.

# %%
faster = predict(
    "time of averaging per parameter divided by time of averaging flat", N=WORLD_SIZE
)

# %% [markdown]
# Now write the flat way.
#
# ### Exercise 03.average_gradients_flat
#
# *Difficulty: medium. Importance: high; the buckets of lab 05 and all of ZeRO are flat buffers. Give it 15 minutes.*
#
# **Contract.** The same result as `average_gradients`, in all its points, but with **one** `all_reduce` for each dtype
# among the gradients, however many parameters there are. (One tiny call more is fine, if you want to find out who has
# gradients.) A model may have no parameters at all, and a transposed gradient cannot be flattened with `view(-1)`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# `torch.cat` makes one vector of many. What would it do with a float16 and a float64 gradient?
# </details>
#
# <details><summary>Hint 2: the way there</summary>
#
# Collect the parameters by dtype in a dictionary. For each dtype: `torch.cat([p.grad.reshape(-1) for p in group])`,
# divide, reduce. All ranks must go through the dtypes in one order. A dictionary keeps the order in which its keys came.
# A set promises none, and on separately started processes it can differ. Neither the check nor a run here would show
# it, because the ranks of one `launch` are copies of one process.
# </details>
#
# <details><summary>Hint 3: and back</summary>
#
# `flat.split([p.numel() for p in group])` gives the pieces in the same order. `p.grad.copy_(piece.view_as(p))` writes
# one back. `torch.cat` has made a copy: without this step nothing has happened to `.grad`.
# </details>


# %% nbgrader={"grade": false, "grade_id": "average_gradients_flat", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def average_gradients_flat(module):
    """`.grad` of every trained parameter becomes the mean over the ranks, on every rank.

    One all-reduce per dtype: 2(N-1)/N n bytes, as before. Needs a second copy of the gradients for a while.
    """
    ### BEGIN SOLUTION
    by_dtype = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    for group in by_dtype.values():
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in group])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        pieces = flat.split([parameter.numel() for parameter in group])
        for parameter, piece in zip(group, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-average_gradients_flat", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("03.average_gradients_flat", average_gradients_flat)

# %%
# NBVAL_CHECK_OUTPUT
rows = []
for name, average, predicted in (
    ("per parameter", average_gradients, len(PARAMETERS)),
    ("flat", average_gradients_flat, 1),
):
    run = launch(one_backward, WORLD_SIZE, args=(average, SEED), device=DEVICE)
    rows.append(
        {
            "way": name,
            "calls predicted": predicted,
            "calls": run.traffic[0].by_operation["all_reduce"].calls,
            "bytes sent by a rank": round(run.traffic[0].sent),
        }
    )
table(rows, equal=("calls predicted", "calls"))

# %% [markdown]
# The same bytes in fewer calls. And the time, predicted from the two numbers above, beside the measured one:


# %%
def time_averaging(average, repeats=25):
    model = GPT(SMALL).to(device())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return seconds_of(lambda: average(model), repeats)


def slowest(average):
    return max(
        launch(time_averaging, WORLD_SIZE, args=(average,), device=DEVICE, meter=False).results
    )


per_parameter, flat = slowest(average_gradients), slowest(average_gradients_flat)
table(
    [
        {
            "way": "per parameter",
            "model": "P a + beta n",
            "predicted (ms)": 1e3 * (len(PARAMETERS) * a + beta * 4 * PSI),
            "measured (ms)": 1e3 * per_parameter,
        },
        {
            "way": "flat",
            "model": "a + beta n",
            "predicted (ms)": 1e3 * (a + beta * 4 * PSI),
            "measured (ms)": 1e3 * flat,
        },
    ]
)

# %%
faster.compare(per_parameter / flat)

# %% [markdown]
# Two numbers for everything, on a machine whose ranks may share cores: expect the order of magnitude, not the digits.
# The model also leaves out the copying into the flat buffer and back. What it explains is why the two ways differ at
# all, and when: a call pays off from about $a/\beta$ bytes on, where the bytes cost as much as the call itself.

# %%
print(f"a / beta = {theory.format_bytes(a / beta) if beta else 'beyond what was measured'}")
print(f"an average parameter of this GPT: {theory.format_bytes(4 * PSI / len(PARAMETERS))}")

# %% [markdown]
# The price of the flat way is a second copy of the gradients, and it has to wait until the last gradient is there. Lab
# 05 finds the middle way: several buckets, each on its way while the rest of the backward pass still computes.
#
# ## 5. Different data
#
# N ranks, one data set. In every epoch each item should be used exactly once, by one of the ranks, and in a new random
# order. A function that hands out indices for this is called a **sampler**. It must run without a message: a rank works
# out its own part alone. That is possible if all ranks shuffle *alike*, and each then takes its share of the one order.
#
# Shuffling alike needs a random generator that starts from the same number everywhere: not the global one, which every
# rank has advanced in its own way, but one made for the purpose, from a seed and the epoch.
#
# ### Exercise 03.shard_indices
#
# *Difficulty: easy, with three traps. Importance: high. Give it 15 minutes.*
#
# **Contract.** `shard_indices(length, rank, world_size, epoch, seed=0)` returns the indices that `rank` works on in
# this epoch, as a list (or any sequence, or a tensor) of whole numbers.
#
# - In every epoch, the lists of all ranks together hold every index 0 to length-1 exactly once.
# - Their lengths differ by one at most; with fewer items than ranks some are empty.
# - Another epoch, or another seed, gives another order: one that is drawn over all items, before they are dealt. So the
#   items that share a rank change too, and a list that is only rolled on is not enough.
# - It depends on its arguments alone: no messages, not the process, not the time. It neither uses nor changes global
#   random state.
#
# <details><summary>Hint 1: a nudge</summary>
#
# One shuffled order for all ranks; which elements of it belong to rank r? Think of dealing cards.
# </details>
#
# <details><summary>Hint 2: a generator of its own</summary>
#
# `generator = torch.Generator().manual_seed(some_number)` and `torch.randperm(length, generator=generator)`. The number
# is made of seed and epoch. With `seed * epoch`, what happens for seed 0?
# </details>
#
# <details><summary>Hint 3: dealing</summary>
#
# `order[rank::world_size]` starts at `rank` and takes every N-th. It handles every remainder, and no items at all.
# </details>


# %% nbgrader={"grade": false, "grade_id": "shard_indices", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def shard_indices(length, rank, world_size, epoch, seed=0):
    """This rank's indices in this epoch: every N-th of one order, shuffled alike. Sends nothing."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(length, generator=generator)
    return order[rank::world_size].tolist()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-shard_indices", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("03.shard_indices", shard_indices)

# %% [markdown]
# Who gets what of 13 items, in three epochs, beside what torch's own `DistributedSampler` hands out:


# %%
def torchs_indices(length, rank, world_size, epoch, seed):
    sampler = DistributedSampler(range(length), world_size, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


rows = []
for epoch in range(3):
    for name, sampler in (("yours", shard_indices), ("torch's", torchs_indices)):
        shards = [sampler(13, rank, WORLD_SIZE, epoch, SEED) for rank in range(WORLD_SIZE)]
        dealt = sorted(index for shard in shards for index in shard)
        rows.append(
            {
                "epoch": epoch,
                "sampler": name,
                **{
                    f"rank {rank}": " ".join(map(str, shard))
                    for rank, shard in enumerate(shards)
                },
                "dealt": len(dealt),
                "twice": " ".join(str(i) for i in sorted(set(dealt)) if dealt.count(i) > 1)
                or "-",
            }
        )
table(rows)

# %% [markdown]
# torch's sampler repeats a few items so that all ranks get equally many. Then no rank runs out early, at the price of
# counting some items twice, and a test set measured that way is measured slightly wrong. Yours deals every item once;
# section 8 pays the price of unequal parts.
#
# And if the epoch is forgotten? (With torch's sampler that is the famous forgotten `set_epoch`.) The replicas stay
# equal, no fingerprint differs, the loss falls. Only, the batches of every epoch hold the same items. Count the pairs
# of items that share a batch in epoch 0, and how many of these pairs meet again in epoch 1:


# %%
def pairs_that_meet(epoch, items=48, per_rank=2):
    """All pairs of items that are in one batch, of `per_rank` items from each rank."""
    shards = [shard_indices(items, rank, WORLD_SIZE, epoch, SEED) for rank in range(WORLD_SIZE)]
    pairs = set()
    for start in range(0, items // WORLD_SIZE, per_rank):
        together = [index for shard in shards for index in shard[start : start + per_rank]]
        pairs |= {frozenset((i, j)) for i in together for j in together if i < j}
    return pairs


first = pairs_that_meet(0)
for name, second in (
    ("epoch passed on", pairs_that_meet(1)),
    ("epoch forgotten", pairs_that_meet(0)),
):
    print(f"{name}: {len(first & second)} of {len(first)} pairs meet again")

# %% [markdown]
# ## 6. All together
#
# Here is the whole of DDP, as a training loop. Compare it with a loop for one process: three lines are new.


# %%
def train(model, items, steps, per_rank, lr=3e-3, seed=0, average=average_gradients_flat):
    """Trains the GPT `model` with AdamW on (inputs, targets) `items`, per_rank items a step on each rank.

    Returns this rank's losses and the fingerprint after each step. Every rank calls it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = items
    broadcast_parameters(model)  # new: the same start
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, fingerprints, epoch, mine = [], [], 0, []
    for _ in range(steps):
        if len(mine) < per_rank:
            mine = shard_indices(len(inputs), rank, world_size, epoch, seed)  # new: own data
            epoch += 1
        now, mine = mine[:per_rank], mine[per_rank:]
        optimizer.zero_grad()
        loss = loss_function(model(inputs[now]), targets[now])
        loss.backward()
        average(model)  # new: the same gradient
        optimizer.step()
        losses.append(loss.item())
        fingerprints.append(fingerprint(model))  # only to see
    return losses, fingerprints


# %% [markdown]
# The data are 960 passages of the course's text. With 2, 3 or 4 ranks a step takes 24 of them, 24/N on each rank. (A
# number that does not divide 24 is rounded down: 5 ranks would take 4 each, 20 a step.)

# %%
ITEMS = batch(0, 960, LENGTH, SEED)


def train_gpt(steps):
    torch.set_num_threads(1)  # in a model this small, threads mostly wait for each other
    torch.manual_seed(SEED + dist.get_rank())  # ranks start differently, on purpose
    model = GPT(SMALL).to(device())
    items = [tensor.to(device()) for tensor in ITEMS]
    per_rank = PASSAGES // dist.get_world_size()
    losses, fingerprints = train(model, items, steps, per_rank, seed=SEED)
    written = model.write(encode("Alice ").to(device()), 240, seed=SEED)
    return losses, fingerprints, decode(written)


run_of_gpt = launch(train_gpt, WORLD_SIZE, args=(STEPS,), device=DEVICE, meter=False)
per_step = list(zip(*(prints for _, prints, _ in run_of_gpt.results), strict=True))
agreed = sum(len(set(prints)) == 1 for prints in per_step)
print(f"steps after which all {WORLD_SIZE} fingerprints were equal: {agreed} of {STEPS}")
print("the last ones:", " ".join(per_step[-1]))

# %% [markdown]
# N processes, and after every single step the same bits everywhere, although no weight has been sent since the first
# moment. The loss, on rank 0's part of each batch and as the mean over all ranks:

# %%
alone = run_of_gpt.results[0][0]
of_all = list(zip(*(losses for losses, _, _ in run_of_gpt.results), strict=True))
mean = [sum(losses) / WORLD_SIZE for losses in of_all]
curves({"mean over the ranks": mean, "rank 0's part alone": alone}, ylabel="loss (nats)")

# %% [markdown]
# The mean is smoother: it is the loss of a batch N times as large. That is what DDP buys.
#
# ## 7. Leave one out
#
# Every ingredient is there for a reason. Take them away one at a time, and measure after every step how far the
# replicas are apart: the largest difference between any two ranks in any weight or buffer.
#
# For this the GPT gets a buffer that matters: random numbers that are added to every position and never trained. And
# there is one more ingredient, easy to overlook: the gradient must be the same *to the last bit*. In one of the runs
# every rank gathers all gradients and adds them up itself, beginning with its own. Mathematically that is the same sum.
#
# **Write down, before you run it:** which of these runs drift further and further apart, which stay as far apart as they
# began, and which remain at zero?
#
# - complete
# - no broadcast at the start
# - parameters broadcast, but not the buffer
# - one of the parameters (a bias of 64 numbers) not averaged
# - each rank adds up in an order of its own
# - no averaging


# %%
class GPTWithCode(GPT):
    """Adds fixed random numbers to each position: a buffer."""

    def __init__(self, size=SMALL):
        super().__init__(size)
        self.register_buffer("code", 0.002 * torch.randn(size.context, size.width))

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions + self.code
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def average_in_own_order(module):
    """The mean, added up from this rank on: r, r+1, ..., r-1."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in module.parameters():
        parts = [torch.empty_like(parameter.grad) for _ in range(world_size)]
        dist.all_gather(parts, parameter.grad)
        total = parts[rank].clone()
        for other in range(1, world_size):
            total += parts[(rank + other) % world_size]
        parameter.grad = total / world_size


def drift(left_out, steps=16):
    """The largest difference between replicas before the first step and after each; the final state."""
    torch.manual_seed(SEED + dist.get_rank())
    model = GPTWithCode().to(device())
    code = model.code.clone()
    if left_out != "broadcast":
        broadcast_parameters(model)
    if left_out == "buffer":
        model.code.copy_(code)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    differences = [largest_difference(model)]
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = part_of(step, SEED, device())
        loss_function(model(inputs), targets).backward()
        own = model.norm.bias.grad.clone()
        if left_out == "order":
            average_in_own_order(model)
        elif left_out != "averaging":
            average_gradients_flat(model)
        if left_out == "one parameter":
            model.norm.bias.grad.copy_(own)
        optimizer.step()
        differences.append(largest_difference(model))
    return differences, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


LEFT_OUT = {
    "no averaging": "averaging",
    "no broadcast at the start": "broadcast",
    "the buffer not broadcast": "buffer",
    "one parameter not averaged": "one parameter",
    "each rank sums in its own order": "order",
    "complete": "",
}
drift_runs = {
    name: launch(drift, WORLD_SIZE, args=(what,), device=DEVICE, meter=False).results
    for name, what in LEFT_OUT.items()
}
drifts = {name: of_ranks[0][0] for name, of_ranks in drift_runs.items()}

# %% tags=["picture"]
as_svg(
    curves(
        drifts,
        ylabel="largest difference",
        title="Replicas drifting apart when one ingredient is missing",
        log=True,
        floor=1e-10,
    ),
    "How far apart the replicas of a model are after each step, with one ingredient of DDP missing",
)

# %% [markdown]
# The same runs in numbers. The last two columns look at the final states bit by bit: which tensors of the model are
# not equal on all ranks?

# %%
rows = []
for name, of_ranks in drift_runs.items():
    differences, first = of_ranks[0]
    unequal = [
        key
        for key in first
        if any(not torch.equal(first[key], state[key]) for _, state in of_ranks)
    ]
    rows.append(
        {
            "left out": name,
            "at the start": differences[0],
            "after 1 step": differences[1],
            "after 16 steps": differences[-1],
            "tensors that differ": f"{len(unequal)} of {len(first)}",
            "which": ", ".join(unequal) if len(unequal) == 1 else "-",
        }
    )
table(rows, title="largest difference between replicas, and what differs in the end")

# %% [markdown]
# Read the picture and the table line by line.
#
# - **Complete:** zero. Not small: zero.
# - **No averaging:** each rank trains a model of its own, and they part with the first step.
# - **No broadcast:** the replicas start apart and stay as far apart as they began. All of them take the same steps, but
#   from different places. The gradient they share is the mean over N different models, and belongs to none of them.
# - **The buffer:** its difference never changes, for it is not trained. All parameters agree to the last bit, as the table
#   shows, but no two ranks compute the same function with them.
# - **One parameter** is enough, a vector of 64 numbers: all other tensors stay equal to the bit, and still the models
#   part.
# - **Own order:** the last digit of a float32. From step to step the difference may grow or shrink. But nothing pulls
#   the replicas together again, and unequal weights make unequal gradients in the next step. (With N = 2 it stays at
#   zero: a + b = b + a.) This is why we compare fingerprints, and not numbers "up to rounding".
#
# What about the sampler's epoch? It is not in the picture, because it causes no drift: the replicas agree on training
# with the same batches again and again. An instrument shows what it measures, and nothing else.
#
# ## 8. When the parts are not equal
#
# Take 6N + 1 items on N ranks, up to 6 per rank and step. After the first step one item is left over: rank 0 has it, the
# others have none. First, what happens if a rank simply leaves when it has nothing left?


# %%
def leaves_early(items, per_rank=6):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = shard_indices(items, rank, world_size, epoch=0, seed=SEED)
    model = nn.Linear(1, 1).to(device())
    for start in range(0, len(mine), per_rank):
        now = torch.tensor(mine[start : start + per_rank], device=device()).float()
        model(now[:, None]).mean().backward()
        average_gradients(model)


try:
    launch(leaves_early, WORLD_SIZE, args=(6 * WORLD_SIZE + 1,), device="cpu")
except LaunchError as report:
    print(report)

# %% [markdown]
# Rank 0 has one batch more, and waits for ranks that have finished. In a plain run nobody would tell you at once. If the
# others go on to something else, rank 0's call meets their next one, whatever that is for. If they make none, it waits
# for the backend's timeout, by default 30 minutes with gloo and 10 with NCCL (lab 00). So everybody must take part in
# every step of the epoch, with an empty batch if need be. How many steps there are is known without asking: the longest
# part has ceil(length / N) items.
#
# Second, the mean. Say that in the last step the ranks have $b_0, b_1, \dots$ items, together $b$. A plain mean of
# means gives every rank the weight 1/N, and an item on a rank with few items counts for more than one on a full rank.
# The whole batch's gradient gives rank r the weight $b_r / b$. So let every rank multiply its loss by
#
# $$\frac{N\, b_r}{b} \qquad \text{since then} \qquad \frac1N \sum_r \frac{N\, b_r}{b}\, \nabla L_r = \sum_r
# \frac{b_r}{b}\, \nabla L_r = \nabla L ,$$
#
# and average as always. A rank without items has the weight 0: it computes no loss, and takes part with the zeros that
# `average_gradients` puts where there is no gradient. $b$ is one more tiny all-reduce, or known from the sampler.


# %%
def last_batch(weighted, sizes):
    """Relative error of the averaged gradient against the one of the whole batch; sizes: items by rank."""
    torch.manual_seed(SEED)
    model = GPT(SMALL).to(device()).double()
    inputs, targets = (tensor.to(device()) for tensor in batch(0, sum(sizes), LENGTH, SEED))
    loss_function(model(inputs).double(), targets).backward()
    whole = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    model.zero_grad()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    start, mine = sum(sizes[:rank]), sizes[rank]
    if mine:
        loss = loss_function(model(inputs[start : start + mine]), targets[start : start + mine])
        (loss * (world_size * mine / sum(sizes) if weighted else 1)).backward()
    average_gradients(model)
    averaged = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    return ((averaged - whole).norm() / whole.norm()).item()


rows = []
for sizes in ([6] * WORLD_SIZE, [6] + [5] * (WORLD_SIZE - 1), [1] + [0] * (WORLD_SIZE - 1)):
    plain, weighted = (
        launch(
            last_batch, WORLD_SIZE, args=(weighted, sizes), device=DEVICE, meter=False
        ).results[0]
        for weighted in (False, True)
    )
    rows.append(
        {
            "items by rank": " ".join(map(str, sizes)),
            "plain mean, error": plain,
            "weighted, error": weighted,
        }
    )
table(
    rows, title="gradient over N ranks against the whole batch in one process, relative error"
)

# %% [markdown]
# What remains in the weighted column is rounding. In the last row the plain mean is off by the factor 1/N: the only
# gradient there is has been averaged with zeros.
#
# ## 9. Proof of equality
#
# N ranks that agree with each other could still all be wrong. The claim is stronger: they do what one process would do
# with the whole batch. Let us measure it, and say exactly what "the same" means. Four ways to take the same 5 steps of
# SGD from the same start on the same 24 passages a step:
#
# - **N ranks**, with your functions;
# - **one process, part by part**: for each of the N parts, backward of its loss divided by N; gradients add up in
#   `.grad`;
# - **one process, whole batch**: a single backward;
# - **torch's DDP** on N ranks: `DistributedDataParallel` wraps the model, broadcasts, and averages inside `backward`.


# %%
def final_weights(model):
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return flat.cpu(), fingerprint(model)


def five_steps(way, parts, steps=5):
    """way: "ours", "torch's", "parts" or "whole". Returns the weights, their fingerprint, this rank's losses."""
    # Several threads would share out a sum, and add it up in another order.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = GPT(SMALL).to(device())
    if way == "ours":
        broadcast_parameters(model)
    run_forward = DistributedDataParallel(model) if way == "torch's" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (
            tensor.to(device()) for tensor in batch(step, PASSAGES, LENGTH, SEED)
        )
        if way == "whole":
            chosen = [slice(None)]
        elif way == "parts":
            chosen = [slice(part, None, parts) for part in range(parts)]
        else:
            chosen = [slice(dist.get_rank(), None, parts)]
        for part in chosen:
            loss = loss_function(run_forward(inputs[part]), targets[part])
            (loss / len(chosen)).backward()
            losses.append(loss.item())
        if way == "ours":
            average_gradients_flat(model)
        optimizer.step()
    return *final_weights(model), losses


def compare(ranks):
    runs = {
        way: launch(five_steps, processes, args=(way, ranks), device=DEVICE, meter=False)
        for way, processes in (("ours", ranks), ("torch's", ranks), ("parts", 1), ("whole", 1))
    }
    ours, digits, losses = runs["ours"].results[0]
    names = {
        "torch's": "torch's DDP",
        "parts": "one process, part by part",
        "whole": "one process, whole batch",
    }
    rows = []
    for way, name in names.items():
        weights, other_digits, other_losses = runs[way].results[0]
        if way == "parts":
            other_losses = other_losses[::ranks]  # of rank 0's part
        differences = [abs(x - y) for x, y in zip(losses, other_losses, strict=True)]
        rows.append(
            {
                "N": ranks,
                "your DDP against": name,
                "weights, largest difference": (ours - weights).abs().max().item(),
                "same bits": "yes" if digits == other_digits else "no",
                # The whole batch has one loss for all parts: there is nothing to compare with rank 0's.
                "losses of rank 0, largest difference": None
                if way == "whole"
                else max(differences),
            }
        )
    return rows


table([row for ranks in sorted({2, WORLD_SIZE}) for row in compare(ranks)])

# %% [markdown]
# What is equal, and what is not:
#
# - With **2 ranks**, all of it, bit for bit, in two of the three comparisons. One process that goes *part by part* does
#   the same arithmetic as two processes: $g_0/2 + g_1/2$. Addition of two numbers does not depend on their order, and
#   halving is exact. (Both ran on one thread: more threads share out the sums inside a matrix product.)
# - With more ranks the same numbers are added in another order, $(a+b)+c \ne a+(b+c)$ in floating point, so the last bits
#   differ. So do torch's: it packs gradients into its buckets in another order than your flat buffer, so an element
#   meets the ranks' contributions in another order.
# - The **whole batch** differs in the last bits even from the sum of its own parts, for 2 ranks too: a matrix product
#   over all rows adds in another order than the products of the parts.
#
# All differences are a few units in the last place of the weights. None of it comes from the method. (Why SGD here, and
# not AdamW? Because SGD is honest: the next section.)
#
# ## 10. An error that hides: the factor
#
# Forget to divide by N, and the gradient is N times too large. Divide twice, and it is N times too small. We take 20
# steps with SGD and with AdamW, each with the gradient times 1, times N and times 1/N. Four of these six runs have a
# wrong factor. **Predict:** in how many of the four does the loss differ by more than 0.05 from that of the right run
# with the same optimizer?

# %%
visible = predict("runs of the four with a wrong factor whose loss differs by more than 0.05")


# %%
def with_factor(kind, factor, steps=20):
    model = build_alike(SEED)
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = part_of(step, SEED, device())
        loss = loss_function(model(inputs), targets)
        loss.backward()
        average_gradients_flat(model)
        for parameter in model.parameters():
            parameter.grad *= factor
        optimizer.step()
    return loss.item(), final_weights(model)[0]


rows, seen = [], 0
for kind in ("SGD", "AdamW"):
    outcomes = {
        name: launch(
            with_factor, WORLD_SIZE, args=(kind, factor), device=DEVICE, meter=False
        ).results[0]
        for name, factor in (
            ("mean", 1.0),
            ("sum: not divided", WORLD_SIZE),
            ("divided twice", 1 / WORLD_SIZE),
        )
    }
    right_loss, right_weights = outcomes["mean"]
    for name, (loss, weights) in outcomes.items():
        seen += name != "mean" and not abs(loss - right_loss) < 0.05  # NaN too
        rows.append(
            {
                "optimizer": kind,
                "gradient": name,
                "loss of rank 0 after 20 steps": loss,
                "weights, typical difference": (weights - right_weights).abs().median().item(),
            }
        )
table(rows)

# %%
visible.compare(seen)

# %% [markdown]
# With SGD both errors change the loss, exactly as another learning rate would: a gradient times N is a learning rate
# times N. So it need not look like an error. After few steps the larger one can even have the lower loss, as it has
# here with N = 2. With AdamW neither shows. Adam divides the first moment by the square root of the second. Both are
# made of gradients, so a factor in the gradient cancels, up to the tiny epsilon in the denominator. A wrong factor is
# invisible with AdamW, and so is a test that looks at the loss of AdamW. Then somebody turns on gradient clipping, or
# switches to SGD, and training is broken for no visible reason. The checks of this lab look at `.grad` itself.
#
# ## 11. Dropout and BatchNorm: what is not equal
#
# DDP promises that all replicas hold the same parameters. It does not promise that N ranks compute what one process
# would, if a layer looks at more than its own sample, or draws random numbers.
#
# **Dropout** draws a mask. Every rank draws from its own generator.


# %%
def with_dropout(seeds_differ):
    torch.manual_seed(SEED)
    model = GPT(Size(dropout=0.2)).to(device())
    torch.manual_seed(SEED + 1 + (dist.get_rank() if seeds_differ else 0))
    mask = nn.functional.dropout(torch.ones(16, device=device()), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = part_of(step, SEED, device())
        loss_function(model(inputs), targets).backward()
        average_gradients_flat(model)
        optimizer.step()
    return "".join("x" if kept else "." for kept in mask.tolist()), fingerprint(model)


print("the first mask of each rank, x: kept, .: dropped")
for name, differ in (("ranks seeded differently", True), ("ranks seeded alike", False)):
    run = launch(with_dropout, WORLD_SIZE, args=(differ,), device=DEVICE)
    masks, prints = zip(*run.results, strict=True)
    print(f"{name}: {len(set(prints))} fingerprint for {WORLD_SIZE} ranks after 3 steps")
    print("\n".join(f"   rank {rank}: {mask}" for rank, mask in enumerate(masks)))

# %% [markdown]
# The replicas stay equal either way: the masks go into the gradients, and the gradients are averaged. But with equal
# seeds all ranks drop the same units in the same step, on different data. That is less random than it should be. So
# ranks should *start* equal and *draw* differently: broadcast the weights, and seed by rank. Either way the run is not
# the one that a single process makes, whose generator draws one mask for the whole batch.
#
# **BatchNorm** normalises by the mean and variance of the batch, and a rank only sees its own part. It also keeps a
# running mean and variance for later, as buffers, from what it has seen.


# %%
def with_batch_norm(normalise, whole_batch=False, steps=3):
    torch.manual_seed(SEED)
    layers = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if normalise else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(16, 1)).to(device())
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(48, 8, generator=generator).to(device())
        mine = inputs if whole_batch else inputs[dist.get_rank() :: dist.get_world_size()]
        (model(mine) - mine[:, :1]).square().mean().backward()
        average_gradients_flat(model)
        optimizer.step()
    buffers = [buffer.cpu() for buffer in model.buffers()]
    return final_weights(model)[0], buffers[0] if buffers else None


rows = []
for normalise in (False, True):
    run = launch(with_batch_norm, WORLD_SIZE, args=(normalise,), device=DEVICE)
    whole = launch(with_batch_norm, 1, args=(normalise, True), device=DEVICE).results[0]
    weights = [result[0] for result in run.results]
    means = [result[1] for result in run.results]
    rows.append(
        {
            "model": "with BatchNorm" if normalise else "without",
            "parameters equal on all ranks": "yes"
            if all(torch.equal(one, weights[0]) for one in weights)
            else "no",
            "running means equal": "-"
            if not normalise
            else "yes"
            if all(torch.equal(one, means[0]) for one in means)
            else "no",
            "parameters against one process": (weights[0] - whole[0]).abs().max().item(),
        }
    )
table(rows, title="after 3 steps")

# %% [markdown]
# Three different answers in one table. The parameters agree between the ranks, as promised. They do not agree with one
# process on the whole batch, and that is no rounding: each rank has normalised by the statistics of its own part. And
# the running means have been different since the first step, because nobody averages buffers. If rank 1 evaluates the
# model, it gets other results than rank 0.
#
# torch's DDP therefore broadcasts rank 0's buffers again before every forward pass (`broadcast_buffers=True`), which
# makes them equal, though they still tell of rank 0's data only. `SyncBatchNorm` computes mean and variance over all
# ranks, and costs a message per layer. A GPT has LayerNorm, which looks at one sample at a time: none of this concerns
# it.
#
# ## 12. The ledger
#
# The same GPT as in labs 01 and 02, the same batch, float16 weights and gradients with the engine of lab 01. What does
# one rank hold, and what does it send?

# %%
states = reuse("01_model_states")


def train_in_halves(average, steps=2):
    """Bytes of model states that this rank holds between two steps."""
    torch.manual_seed(SEED)
    model = GPT(SMALL).to(device()).half()
    broadcast_parameters(model)
    engine = states.MixedPrecisionAdam(model.parameters())
    for step in range(steps):
        engine.zero_grad()
        inputs, targets = part_of(step, SEED, device())
        engine.backward(loss_function(model(inputs), targets))
        average(model)
        engine.step()
    return sum(states.model_state_bytes(model, engine).values())


def row(name, average, limited_by, steps=2):
    run = launch(train_in_halves, WORLD_SIZE, args=(average, steps), device=DEVICE)
    busiest = max(run.traffic, key=lambda rank: rank.by_operation["all_reduce"].sent)
    reduced = busiest.by_operation["all_reduce"]
    return LedgerRow(
        lab="03",
        strategy=name,
        world_size=WORLD_SIZE,
        held=max(run.results),
        held_formula=theory.model_state_bytes("ddp", PSI, WORLD_SIZE),
        sent=reduced.sent / steps,
        sent_formula=2 * theory.step_volume("ddp", PSI, WORLD_SIZE).sent,  # 2 bytes each
        messages=reduced.calls // steps,
        limited_by=limited_by,
    )


record(
    row("DDP, per parameter", average_gradients, "a call for each parameter"),
    row("DDP, flat", average_gradients_flat, "waits for the last gradient; a copy of all"),
)

# %% [markdown]
# Held: 16$\psi$ on **every** rank. N ranks hold N times the same 16$\psi$ bytes, and all N optimizers compute the same
# update. That is the waste which ZeRO removes, from lab 06 on. Sent: 2(N-1)/N times the gradients, and a few bytes more
# than the formula, because the engine's overflow flag is reduced too, one number a step (it is also one of the
# calls).
#
# The column "calls" counts what the program calls. In lab 02 a call is a send, so there it is the number of messages.
# Here a call is an `all_reduce` of the library, which sends 2(N-1) messages from each rank inside, as you will see in
# lab 04. So compare the two rows of this lab with each other.
#
# ## 13. For joy
#
# What rank 0's model of section 6 writes. Every rank writes the same.

# %%
written = run_of_gpt.results[0][2]
print(written)
print()
print("all ranks wrote the same:", len({result[2] for result in run_of_gpt.results}) == 1)

# %% [markdown]
# And one process alone? Each step of section 6 took the next 24 items of the shuffled order and dealt them to the ranks.
# If N divides 24, these are the same 24 whatever N is, so one process that runs the same function takes the same steps,
# but for rounding. Does a last bit, carried through all these steps, change what is written?

# %%
by_one = launch(train_gpt, 1, args=(STEPS,), device=DEVICE, meter=False).results[0][2]
equal = next(
    (place for place, (x, y) in enumerate(zip(written, by_one, strict=True)) if x != y),
    len(written),
)
print(
    f"{WORLD_SIZE} ranks and one process agree in the first {equal} of {len(written)} characters"
)

# %% [markdown]
# ## 14. What production systems do differently
#
# - **torch's `DistributedDataParallel`** does what you did here, and hides the cost: it starts the reduction of a bucket
#   of gradients while the backward pass still computes the others. You build that in lab 05.
# - It checks at construction that all ranks have the same parameters in the same shapes, and can find parameters that
#   got no gradient (`find_unused_parameters=True`), which costs a walk through the graph and a flag for each of them.
# - **Uneven data**: torch offers the context manager `Join`, in which a rank that has run out shadows the collective
#   calls of the others; many just drop the last batch.
# - With **NCCL** the sum can be divided inside the operation (`ReduceOp.AVG`), and gradients often travel in bfloat16
#   while the weights are float32.
# - Comparing hashes of the replicas now and then costs little. It finds whatever makes a replica drift and leaves the
#   loss as it was: a defective chip, say, or sums in another order on each rank, as in section 7.
#
# ## 15. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** A colleague seeds all ranks alike and leaves the broadcast out. It works. Name two ways in which it will stop
# working one day.

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-seeds", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# A rank draws a random number more than the others before it builds the model (a data loader, an `if rank == 0`). Or
# only rank 0 loads a checkpoint. Or machines with different devices or library versions draw different numbers from the
# same seed. Besides, equal seeds give equal dropout masks on all ranks.

# %% [markdown]
# **Q2.** A model has P = 300 parameter tensors and n = 28 GB of gradients; a call costs a = 100 microseconds and a GB 10
# milliseconds. How much of the time does the flat way save? And for a model with the same P and n = 28 MB?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-flat", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# It saves 299 times 100 microseconds, 30 ms. Of 28 GB, which take 280 ms, that is 30 of 310 ms, a tenth. Of 28 MB, which
# take 0.28 ms, it is nearly everything: 30.3 ms become 0.4 ms.

# %% [markdown]
# **Q3.** Rank 2 has found an inf in its float16 gradients *before* averaging, and alone skips the step. What happens? What
# should it do?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-skip", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# If it also skips the all-reduce, the others wait until the timeout, or meet a later call of rank 2. If it takes part,
# all ranks get the inf in the mean, and if only rank 2 skips the update, the replicas part. The decision must be common:
# look at the averaged gradient, which is the same on all ranks, or all-reduce a flag, as the engine of lab 01 does.

# %% [markdown]
# **Q4.** After every step you compare fingerprints, and they are always equal. Which of the errors of this lab can still
# be there?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-fingerprint", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# All that every rank does alike: not dividing by N or dividing twice, the same order in each epoch, all ranks working on
# the same data, a plain mean over unequal parts, the same dropout masks. Equal replicas can be equally wrong; for that
# there is the comparison with one process.

# %% [markdown]
# ## Sources
#
# - S. Li et al.: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, arXiv
#   2006.15704: sections 2.2 (why gradients are averaged, and not parameters), 3.2.1 (the naive solution), 3.2.2 (few
#   large calls against many small ones), 3.2.3 (parameters that get no gradient on some rank).
# - PyTorch documentation, `torch.nn.parallel.DistributedDataParallel` (`broadcast_buffers`, `find_unused_parameters`),
#   `torch.utils.data.distributed.DistributedSampler` (`set_epoch`, `drop_last`) and
#   `torch.distributed.algorithms.Join`.
# - P. Goyal et al.: *Accurate, Large Minibatch SGD*, 2017, arXiv 1706.02677: section 3 (what to divide by, one shuffling
#   per epoch, and other traps of distributed SGD).
# - S. Ioffe, C. Szegedy: *Batch Normalization*, 2015, arXiv 1502.03167: section 3.
# - D. Kingma, J. Ba: *Adam*, 2015, arXiv 1412.6980, section 2.1: the step does not depend on the gradient's scale.

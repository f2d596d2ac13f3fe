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
# # 07 - ZeRO-2: a gradient goes to its owner, and is gone
#
# **You build:** `Zero2`, an engine that reduces a bucket of gradients to its owners while backward computes the next,
# and gives its memory back at once. **Time:** 60 to 80 minutes.
#
# **Where this stands.** In lab 06 you split the optimizer's state: of its 12 bytes a parameter, every rank holds one
# N-th. Weights and gradients stayed whole, 2 bytes each. But look at what a rank does with its gradients. It computes
# all of them, sends them to their owners, and updates *its own* N-th of the weights. Of the 2$\psi$ bytes that it
# holds, it uses 2$\psi$/N. The rest has no use once the owner has it.
#
# At the end of this notebook a rank holds a gradient of others only from the moment in which backward computes it until
# its owner has the sum. You will see gradients come and go during one backward pass, predict the most that is ever
# alive, and measure it. You will also measure what that costs: bytes sent, and calls.
#
# **Letters.** N is the number of ranks, $\psi$ the number of parameters of the model. Where nothing else is said,
# weights and gradients are float16, 2 bytes each. A flat tensor is padded with zeros to N equal chunks: $\psi'$ counts
# the padding too, at most N-1 elements for each flat tensor.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
BUCKET_BYTES = 100_000  # for float16 gradients on their way (section 5); twice that for float32

# %% tags=["export"]
import torch
import torch.distributed as dist

from shardlab import reuse
from shardlab.meters import label

Zero = reuse("06_zero1").Zero

# %%
from functools import partial
from itertools import pairwise

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from shardlab import check, device, launch, predict, show, table, theory
from shardlab.communicator import Library, mine_of
from shardlab.errors import LaunchError
from shardlab.fingerprint import fingerprint
from shardlab.ledger import LedgerRow, record
from shardlab.meters import mark, memory_so_far
from shardlab.model import GPT, SMALL, Size, loss_function
from shardlab.shard_map import shard_map, watch_states
from shardlab.text import batch
from shardlab.timeline import watch_layers
from shardlab.widgets.charts import steps_against
from shardlab.widgets.curves import curves

Zero1, Rings = reuse("06_zero1").Zero1, reuse("06_zero1").Rings
DEEP = Size(layers=8)  # more layers than in the other labs: more moments to look at
PSI = GPT(DEEP).parameter_count
PARAMETERS = len(list(GPT(DEEP).parameters()))
print(f"psi = {PSI:,} in {PARAMETERS} parameters; all gradients: {2 * PSI:,} bytes")

# %% [markdown]
# ## 1. What ZeRO-1 still holds
#
# The memory meter of the course notes every piece of memory that is made and freed. It knows the model's parameters by
# itself. What else a tensor is for, `label` tells it; `Zero1` does that for its own tensors, and below a hook does it
# for every `.grad` in the moment in which it appears.
#
# `one_step` runs on every rank, and leaves a `mark` before backward and before the optimizer's step. It also notes for
# which gradients the step asks. `live_gradients` reads the gradient bytes off the record of the run: one number for
# each gradient that becomes ready, the most that was alive until the next one is ready.


# %%
def part_of(step, passages=12, length=16):
    """This rank's passages of a step's batch: every N-th one."""
    inputs, targets = batch(step, passages, length, SEED)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine].to(device()), targets[mine].to(device())


def new_model(size, dtype=torch.float16):
    torch.manual_seed(SEED + dist.get_rank())  # engines make the ranks equal
    model = GPT(size).to(device(), dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda each: label("gradients", [each.grad])
        )
    return model


def padded(engine):
    """psi': the elements of all flat weights."""
    return sum(len(bucket.weights) for bucket in engine.buckets)


def one_step(make_engine, size=DEEP):
    """A training step on every rank. Returns psi', and the bytes of gradients that step() reads."""
    model = new_model(size)
    engine = make_engine(model)
    find, read = engine.gradient_of, {}  # by bucket: what is asked for twice counts once

    def gradient_of(bucket):
        gradient = find(bucket)
        read[id(bucket)] = gradient.nbytes
        return gradient

    engine.gradient_of = gradient_of
    inputs, targets = part_of(0)
    with watch_layers(model):
        loss = loss_function(engine(inputs), targets)
        mark("backward")
        engine.backward(loss)
        mark("step")
        engine.step()
        mark("end")
    return {"padded": padded(engine), "read": sum(read.values())}


def live_gradients(run, rank=0):
    """Bytes of gradients alive on a rank during backward, from one gradient to the next."""
    memory = run.memory[rank]
    at = {event.label: event.time for event in run.marks[rank]}
    ready = sorted(gradient.ready for gradient in run.gradients[rank])
    bytes_ = []
    for since, until in pairwise([at["backward"], *ready, at["step"]]):
        within = [each.gradients for each in memory.samples if since <= each.time < until]
        bytes_.append(max([memory.at(since).gradients, *within]))
    return bytes_


# %% [markdown]
# **Predict.** `Zero1` keeps all gradients in flat tensors. What is the most gradient bytes that are alive on a rank
# during backward? And how many of them does its optimizer read in the step that follows?

# %%
most_1 = predict("most gradient bytes alive, ZeRO-1", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %%
used = predict(
    "gradient bytes that a rank's optimizer reads", unit="bytes", psi=PSI, N=WORLD_SIZE
)

# %%
zero1 = launch(one_step, WORLD_SIZE, args=(Zero1,), device=DEVICE)
live_1 = live_gradients(zero1)
most_1.compare(max(live_1))

# %%
used.compare(zero1.results[0]["read"])


# %%
def in_the_step(run, rank=0):
    """Bytes alive on a rank, by kind, at three moments."""
    at = {event.label: event.time for event in run.marks[rank]}
    rows = []
    for label_, moment in (
        ("before backward", at["backward"]),
        ("after backward", at["step"]),
        ("after the step", at["end"]),
    ):
        sample = run.memory[rank].at(moment)
        rows.append(
            {
                "moment": label_,
                "weights": sample.parameters,
                "gradients": sample.gradients,
                "optimizer": sample.optimizer,
            }
        )
    return rows


table(in_the_step(zero1), title=f"ZeRO-1, bytes on rank 0 of {WORLD_SIZE}")


# %%
def draw(lines):
    """Curves in kB, over the gradients that are ready."""
    in_kb = {name: [each / 1e3 for each in line] for name, line in lines.items()}
    return curves(in_kb, xlabel="gradients ready", ylabel="kB of gradients alive")


read_1 = zero1.results[0]["read"]
draw({"ZeRO-1": live_1, "read by the optimizer": [read_1] * len(live_1)})

# %% [markdown]
# Nearly a straight line: the flat tensors are there before the first gradient comes and after the last one has gone. The
# little on top of 2$\psi$ are the gradients that autograd has just computed, until they are added to their places: at
# most those of the largest layer, weight and bias together.
#
# ## 2. The life of a gradient
#
# Follow the gradient of one weight matrix on one rank.
#
# 1. Backward comes to its layer and computes it. Until now it did not exist.
# 2. It is sent to its owner, or its owners: a matrix may lie across two ranks' parts.
# 3. Each owner receives the sum over all ranks of what is *its* part.
# 4. Much later, when backward is over, the owner's optimizer reads the sum.
#
# After 3 nobody ever asks for this rank's own gradient again. Only the sums must live until 4, and of those each rank
# holds an N-th:
#
# | | needed from | until | bytes on one rank |
# |---|---|---|---|
# | this rank's own gradients | backward computes them | the owners have the sum | as few as we manage |
# | sums that this rank owns | they arrive | the step, then `zero_grad` | 2$\psi'$/N |
#
# So in the best case the curve above begins near 0 and rises to 2$\psi'$/N. That is the idea of ZeRO's second stage,
# called P$_{os+g}$ in the paper: optimizer state *and gradients* are partitioned (Rajbhandari et al. 2020, section
# 5.2). What is at rest between two steps falls from 4$\psi$ + 12$\psi$/N to 2$\psi$ + 14$\psi$/N.
#
# ## 3. Two attempts that save nothing
#
# The obvious way: let backward finish, lay all gradients end to end in one flat tensor, reduce-scatter it, keep the
# chunk that comes back, drop everything else. Afterwards a rank holds 2$\psi'$/N bytes of gradients. That is right, and
# at rest it is ZeRO-2.
#
# The second is a misunderstanding of the library's older call, `dist.reduce_scatter(output, input_list)`. It takes a
# list of N tensors, and somebody puts N copies of the flat tensor into it. The values are right: every rank receives
# the sum of everything, and takes its part.


# %%
def at_the_end(gradients):
    flat = torch.cat(gradients)
    label("gradients", [flat])
    Library().reduce_scatter(flat).wait()
    return mine_of(flat).clone()


def stacked_copies(gradients):
    copies = torch.cat(gradients).repeat(dist.get_world_size())
    label("gradients", [copies])
    Library().reduce_scatter(copies).wait()
    return mine_of(mine_of(copies)).clone()


def reduce_after_backward(reduce):
    """Backward, then `reduce` makes the flattened gradients into this rank's chunk of the sum. Most bytes alive."""
    model = new_model(DEEP)
    inputs, targets = part_of(0)
    loss_function(model(inputs), targets).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    gradients.append(gradients[0].new_zeros(-PSI % dist.get_world_size()))  # padding
    mine = reduce(gradients)
    label("gradients", [mine])
    return max(sample.gradients for sample in memory_so_far().samples), len(mine)


# %% [markdown]
# **Predict.** What is the most gradient bytes alive with each of the two? Remember that the gradients themselves, in
# `.grad`, are still there when the flat tensor is made.

# %%
most_at_end = predict("most gradient bytes alive, at the end", unit="bytes", psi=PSI)

# %%
most_stacked = predict("most alive, stacked copies", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %%
naive = {
    reduce.__name__: launch(reduce_after_backward, WORLD_SIZE, args=(reduce,), device=DEVICE)
    for reduce in (at_the_end, stacked_copies)
}
most_at_end.compare(naive["at_the_end"].results[0][0])

# %%
most_stacked.compare(naive["stacked_copies"].results[0][0])

# %%
# NBVAL_CHECK_OUTPUT
PADDED = WORLD_SIZE * naive["at_the_end"].results[0][1]  # psi'
table(
    [
        {
            "way": name,
            "copies of all gradients": copies,
            "predicted": 2 * PSI + copies * 2 * PADDED + 2 * PADDED // WORLD_SIZE,
            "measured": run.results[0][0],
            "sent, predicted": copies * 2 * PADDED * (WORLD_SIZE - 1) // WORLD_SIZE,
            "sent": round(run.traffic[0].by_operation["reduce_scatter"].sent),
        }
        for (name, run), copies in zip(naive.items(), (1, WORLD_SIZE), strict=True)
    ],
    equal=("predicted", "measured"),
    title=f"most gradient bytes alive; ZeRO-1: {max(live_1):,}",
)

# %% [markdown]
# At its peak the first way holds the gradients, one flat copy of them, and a chunk: 2 + 1/N times the 2$\psi$ of all
# gradients, but for padding. The second holds N copies instead of one: N + 1 + 1/N times. ZeRO-1 holds 2$\psi$ and one
# layer. At rest both would be ZeRO-2. But what makes a run fail with "out of memory" is the **peak**, and here it comes
# at the end of backward. A class that is called ZeRO-2 and fills a full flat buffer has not lowered it.
#
# ## 4. Buckets that are freed, and when
#
# Gradients must leave *during* backward. You have all that is needed: the buckets and hooks of lab 05, and the
# reduce-scatter that starts now and is waited for later. When a bucket is complete, start its reduction. When that is
# done, keep your chunk of the sum and free the rest.
#
# **When that is done.** Not earlier. Between start and `wait()` the tensor belongs to the operation, which reads it and
# writes to it. Here two ways to be too early, on ranks that complete as late as they may (`slow_ranks`, see lab 05).


# %%
def reduce_one_bucket(wait_first):
    """This rank's part of a sum of ones, and the bytes that are alive while the operation is on its way."""
    before = memory_so_far().at_end.live
    flat = torch.ones(1000 * dist.get_world_size(), device=device())
    handle = Library().reduce_scatter(flat)
    if wait_first:
        handle.wait()
    mine = mine_of(flat).clone()
    del flat
    alive = memory_so_far().at_end.live - before
    handle.wait()
    return mine[:3].tolist(), alive


for wait_first in (True, False):
    arguments = (wait_first,)
    run = launch(
        reduce_one_bucket,
        WORLD_SIZE,
        args=arguments,
        device="cpu",
        slow_ranks=range(WORLD_SIZE),
    )
    chunk, alive = run.results[0]
    print(f"waits first: {wait_first!s:5}  chunk of the sum: {chunk}")
print(f"alive on its way, after `del flat`: {alive:,} bytes; a chunk has 4,000")

# %% [markdown]
# Reading early gives NaN here, where everything comes late on purpose. Elsewhere it may give the right sum for days.
# And the second mistake is one of bookkeeping: `del flat` gave nothing back. The operation that is under
# way holds on to its tensor, as it must; N chunks of 4,000 bytes and the copy of one are alive. So is a tensor of which
# a *view* is kept. `bucket.flat[bucket.mine]` looks like a chunk, and keeps all N alive (lab 01, section 1).
#
# So for every bucket, in this order: start, wait, **add your chunk to a tensor of its own**, then let go of the flat
# tensor *and* of the handle. A handle may refer to the tensor, too: whether it does is the communicator's affair.
#
# ## 5. The budget
#
# How much is then alive at one time, beside the chunks of 2$\psi'$/N? Let b be the bytes of a bucket.
#
# - One bucket is being **filled**: its flat tensor has b bytes from the first gradient on.
# - One bucket is **travelling**. If we waited for it before the next one is opened, almost nothing would overlap (lab
#   05). So there are two flat tensors.
# - Autograd has **just made** the gradients of a layer, which are not yet copied into their places: a weight and its
#   bias come together. Unless a layer is larger than a bucket, that is at most b again.
#
# That makes 3b. `Zero2` therefore takes `bucket_bytes` as the budget for all three, and plans buckets of a third of it.
# **If no layer is larger than a third of the budget**, then, but for the padding of two flat tensors,
#
# $$\text{gradients alive during backward} \;\le\; \frac{2\psi'}{N} + \text{bucket\_bytes} .$$
#
# A parameter larger than a third of the budget has a bucket to itself. Then b is as large as the largest layer, and the
# bound has three times that layer in place of the budget. (All this is for gradients that come in the order of the
# plan, and for parameters of one layer each. A gradient that two layers share is held by autograd until both have added
# to it. Question 3 is about a gradient that doesn't come.)
#
# There is nothing to gain from a budget that is only planned: somebody must keep it. If backward is faster than the
# link, buckets queue up in front of it, and in the end all of them are alive: the full flat buffer again, in pieces.
# So **before a flat tensor is made, count those that are there**. Two may be there in all. When there are too many, wait
# for the oldest that is travelling, and free it. Backward stands still meanwhile: that is the price of the budget.
#
# (Parameters of two groups, say one with weight decay and one without, or of two dtypes, cannot share a bucket. Each
# kind fills one of its own, in turns. With k kinds there may be k+1 flat tensors, and a bucket gets 1/(k+2) of the
# budget. `plan` below does this arithmetic.)
#
# **Predict.** For the GPT above and this budget: what is the most gradient bytes that are alive?

# %%
LARGEST = 2 * max(  # bytes of the largest layer: a weight and its bias
    sum(each.numel() for each in layer.parameters(recurse=False))
    for layer in GPT(DEEP).modules()
)
print(
    f"bucket_bytes = {BUCKET_BYTES:,}; a third: {BUCKET_BYTES // 3:,}; largest layer: {LARGEST:,}"
)
most_2 = predict("most gradient bytes alive, ZeRO-2", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %% [markdown]
# ### Exercise 07.Zero2
#
# *Difficulty: medium: few lines, each in its place. Importance: very high. Give it 40 minutes.*
#
# `Zero` is the class of lab 06 that all stages share. It makes buckets, calls your methods at the right moments, and
# steps. You say what becomes of gradients. These are the calls, for `engine.backward(loss)`:
#
# ```text
# a gradient is there            take(bucket, place, gradient), then `.grad` is set to None
# a bucket is complete, and      launch(bucket), then it is appended to self.travelling
#   all before it have left
# backward is over               launch for the buckets that are left,
#                                land for all in self.travelling, oldest first
# step()                         gradient_of(bucket), for the norm and for the optimizer
# ```
#
# **Contract.** Of `bucket` you need: `bucket.weights`, its flat weights of N chunks, padded; `bucket.chunk`, the
# elements of a chunk; `bucket.mine`, a slice: where this rank's chunk lies in a flat tensor; `bucket.view(flat, place)`:
# where a parameter lies in a flat tensor, in its shape. Gradients come already divided by N (in the loss).
#
# *Step 1. The shard.*
# - `new_bucket(parameters, group)`: the bucket of `Zero`, with two attributes more: `bucket.gradient`, this rank's
#   chunk of the gradients, zeros; and `bucket.flat`, None: the flat tensor exists only for a while.
# - `gradient_of(bucket)` gives this rank's chunk. `zero_grad()` sets the chunks of all buckets to zero.
#
# *Step 2. In and out.*
# - `take(bucket, place, gradient)` puts a gradient in its place in `bucket.flat`, which is made by `self.open(bucket)`
#   when there is none.
# - `launch(bucket)` starts `self.communicator.reduce_scatter(flat)` and keeps its handle. It may be that no parameter
#   of the bucket got a gradient on this rank. The others wait for it all the same: then it sends zeros.
# - `land(bucket)` waits, **adds** the sum of this rank's chunk to `bucket.gradient` (several backward passes add up
#   until `zero_grad`), and lets go of the flat tensor and of the handle.
#
# *Step 3. The budget.*
# - `open(bucket)` makes `bucket.flat`: zeros, as large as the flat weights. Before that it lands travelling buckets,
#   oldest first, until fewer than `self.most_flat` flat tensors are alive, or none is travelling.
#
# *Labels and handles.* Give `label("gradients", [...])` the chunks and the flat tensors: the curves of section 6 count
# as gradients only what has that label. The check needs no label. It counts every byte that is alive, whatever it is
# for. It leaves some room at the peak: whether the budget is kept to the byte you see in section 6. Let go of a handle
# right after its bucket has landed, even where it seems to hold nothing: with another communicator it may.
#
# <details><summary>Hint 1: step 1</summary>
#
# `bucket = super().new_bucket(parameters, group)`. A tensor of the same dtype and on the same device as another:
# `bucket.weights.new_zeros(number_of_elements)`. `label("gradients", [...])` tells the memory meter what it is for.
# </details>
#
# <details><summary>Hint 2: step 2, launch</summary>
#
# Two lines and one of them twice: "when there is no flat tensor, open". `bucket.handle = ...`, without waiting.
# </details>
#
# <details><summary>Hint 3: step 2, land</summary>
#
# ```python
# bucket.handle.wait()
# bucket.gradient += ...  # a part of bucket.flat
# bucket.flat = bucket.handle = None
# ```
# `bucket.gradient = bucket.flat[bucket.mine]` would be wrong twice: it forgets what was there from an earlier backward,
# and as a view it keeps the whole flat tensor alive.
# </details>
#
# <details><summary>Hint 4: step 3</summary>
#
# How many are alive: `sum(each.flat is not None for each in self.buckets)`. Land `self.travelling.pop(0)` in a loop. It
# must end when nothing is travelling: the flat tensors that are left are being filled, and cannot leave.
# </details>
#
# <details><summary>Hint 5: almost the answer</summary>
#
# ```python
# def open(self, bucket):
#     while self.travelling and self.flat_tensors() >= self.most_flat:
#         self.land(...)
#     bucket.flat = torch.zeros_like(...)
#
# def take(self, bucket, place, gradient):
#     if bucket.flat is None:
#         self.open(bucket)
#     bucket.view(...).copy_(...)
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "Zero2", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class Zero2(Zero):
    """Optimizer state and gradients are split over the ranks (Rajbhandari et al. 2020, section 5.2).

    Holds 2 psi + 14 psi/N bytes in fp16. During backward at most `bucket_bytes` more, if no layer
    is larger than a third of that. Sends 2 psi (N-1)/N elements a step with one backward, and one
    number; padding, at most N-1 elements a bucket, comes on top of all.
    """

    def plan(self, bucket_bytes):
        """Buckets of a share of the budget: each kind fills one, one travels, one share is autograd's."""
        kinds = {
            (id(group), parameter.dtype)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self.most_flat = len(kinds) + 1  # flat tensors alive at one time
        return super().plan(bucket_bytes // (self.most_flat + 1))

    def new_bucket(self, parameters, group):
        """A bucket with this rank's chunk of the gradients, and no flat tensor yet."""
        ### BEGIN SOLUTION
        bucket = super().new_bucket(parameters, group)
        bucket.gradient = bucket.weights.new_zeros(bucket.chunk)
        label("gradients", [bucket.gradient])
        bucket.flat = bucket.handle = None
        return bucket
        ### END SOLUTION

    def gradient_of(self, bucket):
        """This rank's chunk of the mean gradients."""
        ### BEGIN SOLUTION
        return bucket.gradient
        ### END SOLUTION

    def zero_grad(self):
        """Forgets the gradients."""
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            bucket.gradient.zero_()
        ### END SOLUTION

    def flat_tensors(self):
        """How many of them are alive."""
        return sum(bucket.flat is not None for bucket in self.buckets)

    def open(self, bucket):
        """Makes the bucket's flat tensor, within the budget: lands what travels if there are too many."""
        ### BEGIN SOLUTION
        while self.travelling and self.flat_tensors() >= self.most_flat:
            self.land(self.travelling.pop(0))
        bucket.flat = torch.zeros_like(bucket.weights)
        label("gradients", [bucket.flat])
        ### END SOLUTION

    def take(self, bucket, place, gradient):
        """A gradient is complete: copies it to its place."""
        ### BEGIN SOLUTION
        if bucket.flat is None:
            self.open(bucket)
        bucket.view(bucket.flat, place).copy_(gradient)
        ### END SOLUTION

    def launch(self, bucket):
        """All of the bucket is there: starts its way to the owners."""
        ### BEGIN SOLUTION
        if bucket.flat is None:
            self.open(bucket)  # zeros: no gradient on this rank, but the others wait for it
        bucket.handle = self.communicator.reduce_scatter(bucket.flat)
        ### END SOLUTION

    def land(self, bucket):
        """Waits, keeps this rank's chunk of the sum, and frees the rest."""
        ### BEGIN SOLUTION
        bucket.handle.wait()
        bucket.gradient += bucket.flat[bucket.mine]
        bucket.flat = bucket.handle = None  # the handle refers to the tensor as well
        ### END SOLUTION

    def states(self):
        yield from super().states()
        for bucket in self.buckets:
            yield "gradients", bucket.gradient, self.pieces(bucket, bucket.mine)
            if bucket.flat is not None:
                yield "gradients", bucket.flat, self.pieces(bucket)


# %% nbgrader={"grade": true, "grade_id": "check-Zero2", "locked": true, "points": 10, "schema_version": 3, "solution": false, "task": false}
check("07.Zero2", Zero2)

# %% [markdown]
# ## 6. Gradients that come and go
#
# The same step as in section 1, with your engine.

# %%
in_budget = partial(Zero2, bucket_bytes=BUCKET_BYTES)
zero2 = launch(one_step, WORLD_SIZE, args=(in_budget,), device=DEVICE)
live_2 = live_gradients(zero2)
most_2.compare(max(live_2))

# %%
table(in_the_step(zero2), title=f"ZeRO-2, bytes on rank 0 of {WORLD_SIZE}")

# %%
read_2 = zero2.results[0]["read"]
draw(
    {
        "ZeRO-1": live_1,
        "ZeRO-2": live_2,
        "bound": [read_2 + BUCKET_BYTES] * len(live_2),
        "read by the optimizer": [read_2] * len(live_2),
    }
)

# %% [markdown]
# The first bucket opens, and the second. From then on two are alive, and each time one opens, an older one lands and is
# gone; the small teeth are the gradients on their way from autograd into a bucket. However many layers there are, what
# is alive above the shard stays below the budget. If your line goes above the bound, look at step 3. It stays a little
# below, as the three shares are rarely all used to the last byte at one time.
#
# In section 2 the shard was to grow from 0. Our engine makes all chunks when it is constructed, so the line begins at
# 2$\psi'$/N: it keeps them between steps anyhow, and memory that is made once cannot be missing later (question 4).
#
# ### Break it on purpose: let go too early
#
# This engine takes its chunk out right after the start of the reduction, and lets go of the flat tensor. It waits, too,
# but later. On ranks that complete late, three steps:


# %%
class LetsGoEarly(Zero2):
    def launch(self, bucket):
        super().launch(bucket)
        bucket.gradient += bucket.flat[bucket.mine]
        bucket.flat = None

    def land(self, bucket):
        bucket.handle.wait()
        bucket.handle = None


def three_answers(engine_class):
    """What step() says in each of three steps, and the scale after it."""
    engine = engine_class(new_model(SMALL), bucket_bytes=BUCKET_BYTES)
    answers = []
    for step in range(3):
        engine.zero_grad()
        inputs, targets = part_of(step)
        engine.backward(loss_function(engine(inputs), targets))
        answers.append((engine.step(), engine.scale))
    return answers


for engine_class in (Zero2, LetsGoEarly):
    run = launch(
        three_answers,
        WORLD_SIZE,
        args=(engine_class,),
        device="cpu",
        slow_ranks=range(WORLD_SIZE),
    )
    print(f"{engine_class.__name__:12}", run.results[0])

# %% [markdown]
# Nothing crashes, and no loss becomes NaN. The norm does. So `step` believes in an overflow, skips, and halves the
# scale, again and again. A run whose loss stands still while its scale falls to 1: look for a missing wait.
#
# ### How large a budget?
#
# **Predict.** The two ends: with a budget of 1 byte every parameter has a bucket of its own. What is the most that is
# alive then? And with torch's usual 25 MiB, into which the whole model fits?

# %%
most_small = predict("most alive, bucket_bytes = 1", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %%
most_large = predict("most alive, 25 MiB", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %%
BUDGETS = [1, 100_000, 200_000, 400_000, 800_000, 25 * 2**20]
swept = []
for budget in BUDGETS:
    make_engine = partial(Zero2, bucket_bytes=budget)
    run = launch(one_step, WORLD_SIZE, args=(make_engine,), device=DEVICE)
    all_gradients, most = 2 * run.results[0]["padded"], max(live_gradients(run))  # 2 psi'
    outside = min(max(budget, 3 * LARGEST), all_gradients + LARGEST)
    swept.append(
        {
            "bucket_bytes": budget,
            "calls": run.traffic[0].by_operation["reduce_scatter"].calls,
            "2 psi' (N-1)/N": all_gradients * (WORLD_SIZE - 1) // WORLD_SIZE,
            "sent": round(run.traffic[0].by_operation["reduce_scatter"].sent),
            "at most, formula": all_gradients // WORLD_SIZE + outside,
            "most alive": most,
            "less than ZeRO-1": "yes" if most < max(live_1) else "no",
        }
    )
most_small.compare(swept[0]["most alive"])

# %%
most_large.compare(swept[-1]["most alive"])

# %%
table(
    swept,
    equal=("2 psi' (N-1)/N", "sent"),
    title=f"ZeRO-1, for comparison: {max(live_1):,} bytes alive, N = {WORLD_SIZE}",
)

# %%
steps_against(
    [row["calls"] for row in swept],
    {
        "ZeRO-2": [row["most alive"] / 1e3 for row in swept],
        "ZeRO-1": [max(live_1) / 1e3 for _ in swept],
        "shard alone": [read_2 / 1e3 for _ in swept],
    },
    xlabel="calls in a backward pass",
    ylabel="kB alive at the peak",
)

# %% [markdown]
# Bytes sent: 2$\psi'$(N-1)/N in every row. However you cut, every element goes once, and only the padding differs. What
# you choose is how much memory to give for how few calls.
#
# With a budget of 1 byte every layer is larger than its share. What is alive then is the shard and, in this GPT, twice
# the largest layer: its gradients as autograd has just made them, and their flat copies.
#
# ### When ZeRO-2 holds more than ZeRO-1
#
# Look at the last row. With 25 MiB, torch's default for DDP, the whole GPT is one bucket: the flat tensor holds all
# gradients, as in ZeRO-1, **and the shard comes on top**. This ZeRO-2 needs *more* memory at its peak than ZeRO-1.
# Nothing is wrong with the code, and at rest it has what it promises. If somebody reports that "ZeRO-2 uses more memory
# than ZeRO-1", look at the size of the model, and at the size of the buckets.
#
# The column "at most, formula" covers all rows. Let B be `bucket_bytes`, or three times the largest layer where that is
# more. All flat tensors together never hold more than 2$\psi'$. So, but for the padding of two flat tensors:
#
# $$\text{ZeRO-1: } 2\psi' + \text{one layer}, \qquad \text{ZeRO-2: at most } \frac{2\psi'}{N} +
# \min(B,\ 2\psi' + \text{one layer}) .$$
#
# To be *sure* to save, keep B below 2$\psi$(N-1)/N. Above it you may still save, as the bound is not always reached:
# the column "less than ZeRO-1" says where that is so. For 7.5 billion parameters on 64 GPUs 2$\psi$(N-1)/N is 14.8 GB,
# and a budget of 1.5 GB is a tenth of that. For small models it is different. In fp16, up to 500 million parameters fit
# into one bucket of 1 GB, DeepSpeed's default (section 13).
#
# ## 7. Ownership changes during backward
#
# The map of lab 06, for one step of your engine. Watch the rows G, the gradients: at rest each rank has its own, in its
# colour. In backward gradients of *all* colours appear, on every rank, at the right end first: whoever computes a
# gradient holds it, and it belongs to somebody else. They travel (hatched), and when they have landed each rank has only
# its own again. The course's small GPT has layers of the same size, so the same budget will do.


# %%
def watched_step(engine_class):
    """A step that the map looks at. Returns the weights' fingerprint after it."""
    engine = engine_class(new_model(SMALL), bucket_bytes=BUCKET_BYTES)
    with watch_layers(engine.module), watch_states(engine):
        inputs, targets = part_of(0)
        engine.backward(loss_function(engine(inputs), targets))
        engine.step()
    return fingerprint(engine.module)


def watched(engine_class):
    return launch(watched_step, WORLD_SIZE, args=(engine_class,), device=DEVICE)


# %% tags=["picture"]
watched_zero2 = watched(Zero2)
show(shard_map(watched_zero2, strategy="zero2", title="your ZeRO-2"))

# %% [markdown]
# **A wrong one, to see how it looks.** This engine differs in one place: after a gradient has been copied into its
# bucket, it stays in `.grad` until the next backward. A slip that no test of values can find.


# %%
class KeepsGrad(Zero2):
    """Everybody keeps every gradient until the next backward."""

    def arrived(self, bucket, place, parameter):
        gradient = parameter.grad
        super().arrived(bucket, place, parameter)
        parameter.grad = gradient

    def backward(self, loss):
        for parameter in self.module.parameters():
            parameter.grad = None
        super().backward(loss)


watched_keeper = watched(KeepsGrad)
show(shard_map(watched_keeper, strategy="zero2", title="a ZeRO-2 that keeps .grad"))

# %%
for name, run in (("Zero2", watched_zero2), ("KeepsGrad", watched_keeper)):
    print(f"{name:9} weights after the step, rank by rank:", *run.results)

# %% [markdown]
# The rows of gradients fill from the right and stay full, in everybody's colours on every rank. A fingerprint is made
# of every bit of the weights (lab 03), and they are equal: only a look at memory tells the two engines apart. The check
# of the exercise looks there, too: try `check("07.Zero2", KeepsGrad)` in a cell of your own.

# %% [markdown]
# ## 8. Predicted and measured: what is held, and what is sent
#
# **Predict.** In bytes: what does a rank hold between two steps, with the course's small GPT? And what does it send in
# a step, gradients and weights together?

# %%
psi = GPT(SMALL).parameter_count
held_2 = predict("bytes held between two steps, ZeRO-2", unit="bytes", psi=psi, N=WORLD_SIZE)

# %%
sent_2 = predict("bytes sent in a step, ZeRO-2", unit="bytes", psi=psi, N=WORLD_SIZE)


# %%
def train(engine_class, steps=2):
    """Some steps of the course's batch. Returns what is alive after the last, psi', and `steps`."""
    engine = engine_class(new_model(SMALL), bucket_bytes=BUCKET_BYTES)
    for step in range(steps):
        engine.zero_grad()
        inputs, targets = part_of(step, 24, 32)
        engine.backward(loss_function(engine(inputs), targets))
        engine.step()
    return {"memory": memory_so_far().at_end, "padded": padded(engine), "steps": steps}


def sent_by(run, *operations):
    """Bytes that rank 0 sends in a step by these operations."""
    by_operation = run.traffic[0].by_operation
    in_all = sum(by_operation[op].sent for op in operations if op in by_operation)
    return in_all / run.results[0]["steps"]


def held_by(run):
    sample = run.results[0]["memory"]
    return sample.parameters + sample.gradients + sample.optimizer


WORLD_SIZES = sorted({1, 2, 3, 4, WORLD_SIZE})
runs = {N: launch(train, N, args=(Zero2,), device=DEVICE) for N in WORLD_SIZES}
held_2.compare(held_by(runs[WORLD_SIZE]))

# %%
sent_2.compare(sent_by(runs[WORLD_SIZE], "reduce_scatter", "all_gather"))

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "N": N,
            "psi'": run.results[0]["padded"],
            "weights": run.results[0]["memory"].parameters,
            "gradients": run.results[0]["memory"].gradients,
            "optimizer": run.results[0]["memory"].optimizer,
            "2 psi' + 14 psi'/N": (2 * N + 14) * run.results[0]["padded"] // N,
            "held": held_by(run),
            "16 psi / held": 16 * psi / held_by(run),
        }
        for N, run in runs.items()
    ],
    equal=("2 psi' + 14 psi'/N", "held"),
    title=f"bytes between two steps; psi = {psi:,}",
)

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "N": N,
            "reduce_scatter": round(sent_by(run, "reduce_scatter")),
            "all_gather": round(sent_by(run, "all_gather")),
            "2 * 2 psi' (N-1)/N": round(2 * 2 * run.results[0]["padded"] * (N - 1) / N),
            "sent": round(sent_by(run, "reduce_scatter", "all_gather")),
            "DDP's all-reduce": round(2 * theory.step_volume("ddp", psi, N).sent),
            "norm": round(sent_by(run, "all_reduce")),
        }
        for N, run in runs.items()
    ],
    equal=("2 * 2 psi' (N-1)/N", "sent"),
    title="bytes sent by rank 0 in a step",
)

# %% [markdown]
# What is sent is DDP's 2$\psi$(N-1)/N elements, but for the padding and one number, the norm. The number has 8 bytes,
# and its all-reduce counts as 2(N-1)/N times 8: that is the column "norm", rounded. An all-reduce *is* a reduce-scatter
# and an all-gather (lab 04). DDP runs one half right after the other, both on gradients. ZeRO puts the optimizer
# between them: the first half carries gradients, the second half the weights that were updated from them.
#
# Memory is paid for in another coin. There are two calls for each bucket, and a small budget makes many buckets. And
# backward waits where the budget is used up.
#
# What is held falls towards 2$\psi$ when N grows: from 16$\psi$ less than a factor of 8, where ZeRO-1 stays below 4.
# Your rings carry the same, message by message:

# %%
# NBVAL_CHECK_OUTPUT
N = WORLD_SIZE


def on_rings(model, **options):
    return Zero2(model, communicator=Rings(), **options)


on_own = launch(train, N, args=(on_rings,), device=DEVICE)
elements = 2 * on_own.results[0]["padded"] * (N - 1) // N  # of gradients and of weights
table(
    [
        {
            "rank": rank.rank,
            "gradients, weights": 2 * elements,
            "norm": norm,
            "predicted": 2 * elements + norm,
            "sent": rank.by_operation["send"].sent // on_own.results[0]["steps"],
        }
        for rank in on_own.traffic
        for norm in [theory.ring_all_reduce_bytes(1, 8, N, rank.rank).sent]
    ],
    equal=("predicted", "sent"),
    title="your rings, bytes sent in a step",
)

# %% [markdown]
# ## 9. What several backward passes cost
#
# A large batch is often computed in k micro-steps: k times forward and backward, then one step. DDP has `no_sync` for
# that (lab 05): gradients add up in `.grad`, and only the last backward sends.
#
# **Predict.** Your engine, k = 4 micro-steps and one step: how many times as many bytes as with k = 1? (Gradients and
# weights together.)

# %%
factor = predict("bytes sent with 4 micro-steps, divided by those with 1")


# %%
def accumulate(micro_steps):
    """One step of several micro-steps. Returns the most gradient bytes alive, and some weights."""
    model = new_model(SMALL, torch.float32)
    engine = Zero2(model, eps=1e-4, bucket_bytes=2 * BUCKET_BYTES)
    for micro_step in range(micro_steps):
        inputs, targets = (
            part.tensor_split(micro_steps)[micro_step] for part in part_of(0, 48, 32)
        )
        engine.backward(loss_function(engine(inputs), targets) / micro_steps)
    engine.step()
    most = max(sample.gradients for sample in memory_so_far().samples)
    some = model.head.weight[0, :4].tolist()
    return {"most": most, "weights": some, "padded": padded(engine), "steps": 1}


micro = {k: launch(accumulate, WORLD_SIZE, args=(k,), device=DEVICE) for k in (1, 2, 4)}
in_all = {k: sent_by(run, "reduce_scatter", "all_gather") for k, run in micro.items()}
factor.compare(in_all[4] / in_all[1])

# %%
N, psi_padded = WORLD_SIZE, micro[1].results[0]["padded"]
table(
    [
        {
            "micro-steps": k,
            "reduce_scatter calls": run.traffic[0].by_operation["reduce_scatter"].calls,
            "predicted": (k + 1) * 4 * psi_padded * (N - 1) // N,
            "sent": round(in_all[k]),
            "DDP with no_sync": round(4 * theory.step_volume("ddp", psi, N).sent),
            "at most, formula": 4 * psi_padded // N + 2 * BUCKET_BYTES,
            "most alive": run.results[0]["most"],
        }
        for k, run in micro.items()
    ],
    equal=("predicted", "sent"),
    title="float32: 4 bytes an element",
)

# %%
for k, run in micro.items():
    print(f"{k} micro-steps:", [round(weight, 6) for weight in run.results[0]["weights"]])

# %% [markdown]
# Each backward reduces all gradients once, and the step gathers all weights once. That makes k + 1 times
# $\psi'$(N-1)/N elements, and (k+1)/2 times what DDP sends with `no_sync`, but for padding. The most that is alive does
# not grow with k, and the bound of section 5 holds, in float32 with twice the budget. The values must be the
# same but for rounding: compare the weights that are printed.
#
# Must it be so? A gradient that is not sent must be kept, and all $\psi$ of them are kept: `no_sync` *is* the full
# gradient buffer. So there is a choice: send in every micro-step and hold an N-th of the gradients, or send once and
# hold all of them in between, as a ZeRO-1 with `no_sync` could. With many micro-steps and a slow link that is a reason
# to stay with ZeRO-1. Section 13 says which engines offer it.
#
# ## 10. Judged together
#
# In lab 01 one process looked at all gradients: is any of them inf or NaN? How large is their norm? Now nobody has all
# gradients. A rank that looks at its own chunk sees an N-th of the truth. Here are the norms that the ranks see, and
# the norm that `global_norm` of lab 06 makes of them: the root of the sum of their squares.


# %%
def norms():
    """The norm of this rank's chunks, the norm that the engine finds, and that of the gradients in one process."""
    engine = Zero2(new_model(SMALL, torch.float32), bucket_bytes=2 * BUCKET_BYTES)
    inputs, targets = part_of(0, 24, 32)
    engine.backward(loss_function(engine(inputs), targets))
    chunks = torch.cat([engine.gradient_of(bucket) for bucket in engine.buckets])
    own = chunks.norm().item() / engine.scale
    together = engine.global_norm() / engine.scale

    torch.manual_seed(SEED)
    alone = GPT(SMALL).to(device())
    inputs, targets = (part.to(device()) for part in batch(0, 24, 32, SEED))
    loss_function(alone(inputs), targets).backward()
    return own, together, torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()


run = launch(norms, WORLD_SIZE, device=DEVICE)
table(
    [
        {
            "rank": rank,
            "its chunks": f"{own:.6f}",
            "all chunks": f"{together:.6f}",
            "one process": f"{alone:.6f}",
        }
        for rank, (own, together, alone) in enumerate(run.results)
    ],
    title="norm of the gradients",
)

# %% [markdown]
# Clipping by its own norm, each rank would shorten its part by a factor of its own: lab 06 did that on purpose, and no
# rank noticed.
#
# ### Break it on purpose: overflow, judged alone
#
# On the last rank one single gradient becomes inf, the first element of the embedding. The sum of it is inf, too, and
# lands in **one** chunk, on one rank. What happens if every rank judges by its own chunks?


# %%
class JudgesAlone(Zero2):
    def global_norm(self):
        chunks = torch.cat([self.gradient_of(bucket) for bucket in self.buckets])
        return chunks.norm(dtype=torch.float64).item()


def overflow_on_one_rank(engine_class):
    """What step() says, the scale after it, and whether any bit of the weights has changed."""
    engine = engine_class(new_model(SMALL), bucket_bytes=BUCKET_BYTES)
    if dist.get_rank() == dist.get_world_size() - 1:
        first = torch.zeros_like(engine.module.embedding.weight)
        first[0, 0] = torch.inf
        engine.module.embedding.weight.register_hook(lambda gradient: gradient + first)
    inputs, targets = part_of(0)
    engine.backward(loss_function(engine(inputs), targets))
    before = fingerprint(engine.module)
    stepped = engine.step()
    return stepped, engine.scale, fingerprint(engine.module) != before


try:
    launch(overflow_on_one_rank, WORLD_SIZE, args=(JudgesAlone,), device=DEVICE)
except LaunchError as report:
    print(report)

# %% [markdown]
# One rank has seen the inf, skips the step, and is done. The others have seen nothing: they have changed their part of
# the weights, and wait in `all_gather` for a rank that will not come. Were it to come all the same, things would be
# worse: new weights and old ones mixed, a different scale on every rank, and no error. Your engine:

# %%
run = launch(overflow_on_one_rank, WORLD_SIZE, args=(Zero2,), device=DEVICE)
table(
    [
        {"rank": rank, "step()": str(stepped), "scale": scale, "weights changed": str(changed)}
        for rank, (stepped, scale, changed) in enumerate(run.results)
    ]
)

# %% [markdown]
# The norm is not finite when any element is not, on any rank. So the one number that is sent for clipping settles the
# overflow too. Note *where* it is looked for: after the reduction, in the sums. The sum of finite gradients can
# overflow as well.
#
# ## 11. The same numbers as before
#
# The values must be those of one process. Three steps in float32, clipped at a norm of 0.5, in five ways: one process
# with the whole batch, torch's DDP with its `ZeroRedundancyOptimizer` (which is ZeRO-1), your `Zero1`, your `Zero2`,
# and `Zero2` on your rings. (eps is $10^{-4}$ as in lab 06: Adam blows up rounding where a gradient is zero.)

# %%
RATE, EPS, MAX_NORM = 1e-3, 1e-4, 0.5


class Torchs(torch.nn.Module):
    """torch's own, in the shape of the course's engines. With one rank: plain AdamW."""

    def __init__(self, model, **_):
        super().__init__()
        self.module, options = model, {"lr": RATE, "eps": EPS, "weight_decay": 0.0}
        if dist.get_world_size() == 1:
            self.run = model
            self.optimizer = torch.optim.AdamW(model.parameters(), **options)
        else:
            self.run = TorchsDDP(model)
            self.optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, **options
            )

    def forward(self, *inputs):
        return self.run(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def three_steps(engine_class):
    """The loss of each step on this rank's part, and the weights, flat, on the CPU."""
    options = {"lr": RATE, "eps": EPS, "max_norm": MAX_NORM, "bucket_bytes": 2 * BUCKET_BYTES}
    engine = engine_class(new_model(SMALL, torch.float32), **options)
    for step in range(3):
        engine.zero_grad()
        inputs, targets = part_of(step, 24, 32)
        engine.backward(loss_function(engine(inputs), targets))
        engine.step()
    return torch.cat([each.detach().flatten().cpu() for each in engine.module.parameters()])


alone = launch(three_steps, 1, args=(Torchs,), device=DEVICE).results[0]
table(
    [
        {
            "engine": name,
            "from one process": f"{max((w - alone).abs().max().item() for w in weights):.0e}",
            "between ranks": f"{max((w - weights[0]).abs().max().item() for w in weights):.0e}",
        }
        for name, engine_class in (
            ("torch: DDP, ZeroRedundancyOptimizer", Torchs),
            ("Zero1", Zero1),
            ("Zero2", Zero2),
            ("Zero2 on your rings", on_rings),
        )
        for weights in [
            launch(three_steps, WORLD_SIZE, args=(engine_class,), device=DEVICE).results
        ]
    ],
    title="largest difference of a weight after three steps",
)

# %% [markdown]
# Rounding: sums over N ranks are added up in another order than one process adds them. Between ranks there is no
# difference at all, because every weight is computed once, by its owner, and copied.
#
# ## 12. The ledger

# %%
run = runs[WORLD_SIZE]
operations = ("reduce_scatter", "all_gather", "all_reduce")
record(
    LedgerRow(
        lab="07",
        strategy="ZeRO-2",
        world_size=WORLD_SIZE,
        held=held_by(run),
        held_formula=theory.model_state_bytes("zero2", psi, WORLD_SIZE),
        sent=sent_by(run, *operations),
        sent_formula=2 * theory.step_volume("zero2", psi, WORLD_SIZE).sent,
        messages=sum(run.traffic[0].by_operation[op].calls for op in operations)
        // run.results[0]["steps"],
        limited_by="weights, whole on every rank",
    )
)

# %% [markdown]
# What is left is the 2$\psi$ of the weights. Every rank holds all of them, all the time, though in any one moment
# forward or backward looks at one layer. You know by now what comes next.
#
# ## 13. What production systems do differently
#
# - **DeepSpeed, stage 2.** `reduce_bucket_size` is what one bucket holds, in *elements*, not bytes: its default of 5e8
#   is 1 GB in fp16, and so is that of `allgather_bucket_size`. `overlap_comm` reduces a bucket while backward fills the
#   next, and needs a second buffer for it: your two flat tensors. `contiguous_gradients` copies gradients into one
#   buffer as they come, which you do as well; without it memory is torn into small pieces.
# - DeepSpeed fills buckets in the order in which gradients **arrive**, and sends what is there when the bucket is full.
#   That needs no plan, and an unused parameter holds nobody up. But all ranks must have the same order. Yours asks for
#   less: ranks may take different branches. The price: a bucket with a parameter that gets no gradient leaves only when
#   backward is over, and with it all buckets behind. In such a step the budget may be exceeded (question 3).
# - **FSDP** with `SHARD_GRAD_OP` (in FSDP2: `reshard_after_forward=False`) is called ZeRO-2, and is a little different:
#   weights are sharded between two steps, gathered in forward, and kept until their layer's backward is over.
# - **Gradient accumulation.** FSDP's `no_sync()` and FSDP2's `set_requires_gradient_sync(False)` keep whole gradients
#   between micro-steps: the choice of section 9. DeepSpeed does not offer it: with gradients partitioned (stages 2 and
#   3) its `no_sync()` is an error.
# - On a GPU nobody may free what a *stream* still reads. Python's `del` gives memory back to the allocator while the
#   communication stream is at work; `record_stream` or an event tells the allocator to wait.
# - The owners' shard is often fp32: sums over many micro-steps lose small parts in fp16. It costs 2$\psi$/N more.
#
# ## 14. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** A model of 7.5 billion parameters, fp16, on 64 GPUs. The budget is 1.5 GB, and no layer has more than 0.5 GB of
# gradients. How many bytes of model states does a GPU hold between two steps? What is the most gradient bytes alive
# during backward, with ZeRO-1 and with ZeRO-2?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-paper", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 2$\psi$ + 14$\psi$/N = 15 GB + 1.64 GB = 16.6 GB, as in the paper's figure 1. Gradients: with ZeRO-1 15 GB and one
# layer. With ZeRO-2 at most 2$\psi$/N + 1.5 GB = 0.234 GB + 1.5 GB = 1.73 GB: no layer is larger than a third of the
# budget, so the bound of section 5 holds.

# %% [markdown]
# **Q2.** Somebody frees the flat tensor right after `launch`, without a wait: "the operation keeps a reference, so the
# memory stays valid". Is the memory saved? Are the values right? Where does the sum arrive?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-in-flight", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Nothing is saved: the reference keeps the tensor alive until the operation is done. The operation itself is right, and
# the sum arrives in the tensor, to which nobody has a name any more. To read the chunk of the sum one needs the tensor
# after `wait()`, so both references, tensor and handle, must live until then, and go together.

# %% [markdown]
# **Q3.** In a model the head, whose gradient comes first, is not used in some steps: on one rank, or on all. What does
# your engine do in such a step? Are the values right? What about memory?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-unused", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# The head's bucket is never complete, and all others wait behind it, because ranks must send in one order. After
# backward it leaves with zeros in the head's place, then the others follow: the values are right. But until then all
# flat tensors are alive, nearly 2$\psi'$, and the shard: more than in ZeRO-1, unless the head is most of the model.
# `open` can land nothing, for nothing travels.

# %% [markdown]
# **Q4.** A rank holds 2$\psi$/N of gradients between steps, though they are needed only from the first sum until the
# step is over. Could it free them in `zero_grad`? What would be gained: at rest, and at the peak?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-zero-grad", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Yes, and make each chunk anew when its bucket lands. Then 2$\psi$/N fewer bytes are held during *forward*, when
# activations grow. At the end of backward all chunks are there, so the peak of gradients is the same. The peak of all
# memory is mostly at the beginning of backward, when all activations are alive: there it would help a little.

# %% [markdown]
# ## Sources
#
# - S. Rajbhandari et al.: *ZeRO: Memory optimizations toward training trillion parameter models*, SC 2020, arXiv
#   1910.02054: section 5.2 (gradient partitioning, and its buckets), figure 1 (bytes), section 7.2.1 (what it sends),
#   section 6.2 (buffers of constant size).
# - S. Li et al.: *PyTorch Distributed*, VLDB 2020, arXiv 2006.15704: section 3.2.4 (accumulation).
# - Y. Zhao et al.: *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023, arXiv 2304.11277:
#   section 3.3.4 (gradient accumulation, with and without communication).
# - DeepSpeed's documentation: *DeepSpeed Configuration JSON*, "ZeRO Optimizations for FP16 Training".
# - PyTorch's documentation: `torch.distributed.optim.ZeroRedundancyOptimizer`, `torch.distributed.fsdp`.

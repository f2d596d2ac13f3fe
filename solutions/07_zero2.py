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
# At the end of this notebook a rank holds a gradient only from the moment in which backward computes it until its owner
# has the sum. You will see gradients come and go during one backward pass, predict the most that is ever alive, and
# measure it. And you will find that it costs nothing: not one byte more is sent than in DDP.
#
# **Letters.** N is the number of ranks, $\psi$ the number of parameters of the model. Weights and gradients are
# float16, 2 bytes each. A flat tensor is padded with zeros to N equal chunks: $\psi'$ counts the padding too.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
BUCKET_BYTES = 200_000  # budget of the engine in most measurements: what is explained in section 5

# %% tags=["export"]
import torch
import torch.distributed as dist

from shardlab import reuse
from shardlab.meters import label

Zero = reuse("06_zero1").Zero

# %%
from functools import partial
from itertools import pairwise

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
# `one_step` runs on every rank, and leaves a `mark` before backward and before the optimizer's step. `live_gradients`
# reads the gradient bytes off the record of the run: one number for each gradient that becomes ready, the most that was
# alive until the next one is ready.


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


def one_step(make_engine, size=DEEP):
    """A training step on every rank. Returns the number of buckets and psi', psi with the padding."""
    model = new_model(size)
    engine = make_engine(model)
    inputs, targets = part_of(0)
    with watch_layers(model):
        loss = loss_function(engine(inputs), targets)
        mark("backward")
        engine.backward(loss)
        mark("step")
        engine.step()
        mark("end")
    return len(engine.buckets), sum(len(bucket.weights) for bucket in engine.buckets)


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
used = predict("gradient bytes that a rank's optimizer reads", unit="bytes", psi=PSI)

# %%
zero1 = launch(one_step, WORLD_SIZE, args=(Zero1,), device=DEVICE)
live_1 = live_gradients(zero1)
most_1.compare(max(live_1))

# %%
used.compare(2 * zero1.results[0][1] // WORLD_SIZE)


# %%
def in_the_step(run, rank=0):
    """What is alive by kind at three moments, and the most during backward."""
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
curves({"ZeRO-1": [each / 1e3 for each in live_1]}, xlabel="gradients ready", ylabel="kB alive")

# %% [markdown]
# A straight line: the flat tensors are there before the first gradient comes and after the last one has gone. The
# little on top of 2$\psi$ is the gradient that autograd has just computed, until it is added to its place.
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
# The first way needs twice as much as ZeRO-1, the second N+1 times and a bit. At rest they would be ZeRO-2. But what
# makes a run fail with "out of memory" is the **peak**, and it comes at the end of backward. A class that is called
# ZeRO-2 and keeps a full flat buffer saves nothing. Published code does both.
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
# Reading early gives NaN here, where everything comes late on purpose. On a quick machine it would give the right sum
# on most days. And the second mistake is one of bookkeeping: `del flat` gave nothing back. The operation that is under
# way holds on to its tensor, as it must; N chunks of 4,000 bytes and the copy of one are alive. So is a tensor of which
# a *view* is kept. `bucket.flat[bucket.mine]` looks like a chunk, and keeps all N alive (lab 01, section 1).
#
# So for every bucket, in this order: start, wait, **add your chunk to a tensor of its own**, then let go of the flat
# tensor *and* of the handle.
#
# ## 5. The budget
#
# How much is then alive at one time, beside the chunks of 2$\psi'$/N? Let b be the bytes of a bucket.
#
# - One bucket is being **filled**: its flat tensor has b bytes from the first gradient on.
# - One bucket is **travelling**. If we waited for it before the next one is opened, nothing would overlap (lab 05). So
#   there are two flat tensors.
# - Autograd has **just made** a gradient, which is not yet copied into its place. Unless one is larger than a bucket,
#   that is at most b again.
#
# That makes 3b. `Zero2` therefore takes `bucket_bytes` as the budget for all three, and plans buckets of a third of it:
#
# $$\text{gradients alive during backward} \;\le\; \frac{2\psi'}{N} + \text{bucket\_bytes} .$$
#
# A parameter larger than a third of the budget has a bucket to itself, and exceeds it.
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
print(f"bucket_bytes = {BUCKET_BYTES:,}; largest parameter: 32,768 bytes")
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

    Holds 2 psi + 14 psi/N bytes in fp16, and `bucket_bytes` more during backward. Sends
    2 psi (N-1)/N elements a step with one backward, and one number.
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
shard = 2 * zero2.results[0][1] // WORLD_SIZE  # bytes: 2 psi'/N
lines = {"ZeRO-1": live_1, "ZeRO-2": live_2}
lines["budget"] = [shard + BUCKET_BYTES] * len(live_2)
lines["shard"] = [shard] * len(live_2)
curves(
    {name: [each / 1e3 for each in line] for name, line in lines.items()},
    xlabel="gradients ready",
    ylabel="kB alive",
)

# %% [markdown]
# The saw: a bucket opens, the gradient that is being copied comes on top, an older bucket lands and is gone. Between
# the teeth the line comes back to the shard and the buckets in flight. It never reaches the budget, as the shares are
# rarely used to the last byte at one time.
#
# The shard is a line, though in section 2 it was to grow from 0. Our engine makes all chunks when it is constructed: it
# keeps them between steps anyhow, and memory that is made once cannot be missing later.
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
    swept.append(
        {
            "bucket_bytes": budget,
            "calls": run.traffic[0].by_operation["reduce_scatter"].calls,
            "sent": round(run.traffic[0].by_operation["reduce_scatter"].sent),
            "at most, formula": shard + budget,
            "most alive": max(live_gradients(run)),
        }
    )
most_small.compare(swept[0]["most alive"])

# %%
most_large.compare(swept[-1]["most alive"])

# %%
table(swept, title=f"ZeRO-1, for comparison: {max(live_1):,} bytes alive, N = {WORLD_SIZE}")

# %%
steps_against(
    [row["calls"] for row in swept],
    {
        "ZeRO-2": [row["most alive"] / 1e3 for row in swept],
        "ZeRO-1": [max(live_1) / 1e3 for _ in swept],
        "shard alone": [shard / 1e3 for _ in swept],
    },
    xlabel="calls in a backward pass",
    ylabel="kB alive at the peak",
)

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
# # 05 - DDP that overlaps
#
# **You build:** `plan_buckets` and `DistributedDataParallel`, which sends gradients while the backward pass still
# computes others. **Time:** 75 to 90 minutes.
#
# **Where this stands.** In lab 03 N processes trained one model: a backward pass, then an all-reduce of all gradients,
# then the optimizer. In lab 04 you built the all-reduce, and nobody can send fewer bytes than it does. But while the
# links work, the processors wait, and while the processors work, the links lie idle. The bytes cannot be saved. The
# waiting can.
#
# A backward pass computes the gradients of the last layer first and those of the first layer last. The last layer's are
# finished long before the pass is over. Why should they not be on their way already?
#
# At the end of this notebook your own DDP does that. You see each layer and each message on one time axis, measure
# which share of the communication is hidden behind computation, and find the size of message at which most is hidden.
# Then you hold it against torch's own `DistributedDataParallel`.
#
# **Letters.** N is the number of ranks, n the bytes of all gradients, P the number of parameters (weight matrices and
# bias vectors, not their elements).

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
LATENCY = 0.0005  # seconds that a message costs on the link of this lab, however small it is
BANDWIDTH = 20e6  # bytes per second that the link carries
BLOCK = 0.02  # seconds that a block's backward takes at least; its forward takes half of that
BUCKET_BYTES = 200_000  # of the DDP in most measurements

# %% tags=["export"]
import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from shardlab import reuse

# %%
import time
from statistics import median

from shardlab import check, device, launch, predict, show, table, theory
from shardlab.errors import LaunchError
from shardlab.ledger import LedgerRow, record
from shardlab.model import GPT, SMALL, Size, loss_function
from shardlab.records import Link
from shardlab.text import batch
from shardlab.timeline import timeline_of, watch_layers
from shardlab.widgets import charts
from shardlab.widgets.timeline import compare

PASSAGES, LENGTH = 24, 32  # the course's batch: 24 passages of 32 characters
DEEP = Size(layers=4)  # twice as deep as the GPT of the other labs: more to see on a time line
PARAMETERS = [parameter.numel() for parameter in GPT(DEEP).parameters()]  # elements of each
P, NBYTES = len(PARAMETERS), 4 * sum(PARAMETERS)
print(f"P = {P} parameters, n = {NBYTES:,} bytes of gradients")

# %% [markdown]
# ## 1. A link that you can see
#
# On one machine a message is through almost at once, and how long it takes depends on what else the machine does. To
# see overlap we need a link that is slow in a known way. `launch(..., link=Link(latency, bandwidth))` gives every rank
# one: whatever it sends takes the time of the alpha-beta model of lab 04, and one operation follows the other.
#
# With $\alpha$ the latency and $\beta$ one over the bandwidth, an all-reduce of b bytes takes
#
# $$t(b) = 2(N-1)\,\alpha + \frac{2(N-1)}{N}\,\beta\, b .$$
#
# The first part is paid for every call. The second is paid for every byte, however the bytes are divided among calls.
#
# The link is made of pauses, and a pause never ends early, only late. So measured times lie a little above the formula,
# by more on a machine that is busy, and by most where there are many calls.

# %%
LINK = Link(latency=LATENCY, bandwidth=BANDWIDTH)
CALL = 2 * (WORLD_SIZE - 1) * LATENCY  # seconds of a call without data
BYTES = theory.collective_time("all_reduce", NBYTES, WORLD_SIZE, 0.0, 1 / BANDWIDTH)
print(f"each call:     {theory.format_seconds(CALL)}")
print(f"all the bytes: {theory.format_seconds(BYTES)}, in however many calls")
print(f"backward:      {theory.format_seconds(DEEP.layers * BLOCK)} at least")

# %% [markdown]
# ## 2. Where we come from: first compute, then send
#
# The class below is lab 03 in the shape that all engines of this lab share: `engine(inputs)` is the forward pass,
# `engine.backward(loss)` leaves the mean over all ranks in every `.grad`. The optimizer stays outside: it is an
# ordinary one.
#
# `Replica` is the common part. It makes all ranks equal at the start, and keeps **buffers** equal: numbers of the model
# that are no parameters, such as the running means of BatchNorm. torch's DDP broadcasts rank 0's buffers before every
# forward pass in training, and so do we. A GPT has none, then nothing is sent.

# %% tags=["export"]
broadcast_parameters = reuse("03_ddp").broadcast_parameters  # of parameters and buffers
average_gradients = reuse("03_ddp").average_gradients  # one blocking all-reduce per parameter


class Replica(torch.nn.Module):
    """A model that is the same on all ranks. Sends the model once, and its buffers before each forward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.synchronise = True  # False inside no_sync(), see section 8
        broadcast_parameters(module)
        # The last layer's gradients are ready first: this is about the order in which they come.
        backwards = reversed(list(module.parameters()))
        self.trained = [parameter for parameter in backwards if parameter.requires_grad]

    def forward(self, *inputs):
        if self.module.training and self.synchronise:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), src=0)
        return self.module(*inputs)


# %%
class AfterBackward(Replica):
    """Lab 03: all gradients, then all messages."""

    def backward(self, loss):
        loss.backward()
        average_gradients(self.module)


# %% [markdown]
# To measure an engine, every rank trains for a few steps, and `watch_layers` notes when each layer's forward and
# backward begin and end. `timeline_of` makes one time axis of it.
#
# One thing more is made on purpose. Ranks that share a few cores take turns in computing, and what overlaps with what
# would be the scheduler's choice. So each block of the GPT also pauses for a fixed time, forward and backward, as if it
# were at work on a device of its own. The values stay the same.


# %%
class Pause(torch.autograd.Function):
    """Passes a tensor on, and its gradient back, and takes its time for both."""

    @staticmethod
    def forward(ctx, tensor):
        time.sleep(BLOCK / 2)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BLOCK)
        return gradient


def paced(model):
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _inputs, output: Pause.apply(output))
    return model


def part_of(step, where):
    """This rank's passages of a step's batch: every N-th one."""
    inputs, targets = batch(step, PASSAGES, LENGTH, SEED)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine].to(where), targets[mine].to(where)


def train(make_engine, steps):
    """Runs on every rank. Returns the gradients of the last step, on the CPU."""
    torch.manual_seed(SEED + dist.get_rank())
    model = paced(GPT(DEEP).to(device()))
    engine = make_engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_layers(model):
        for step in range(steps):
            optimizer.zero_grad()
            inputs, targets = part_of(step, device())
            engine.backward(loss_function(engine(inputs), targets))
            optimizer.step()
    return [parameter.grad.cpu() for parameter in model.parameters()]


STEPS = 3


def run_on_link(make_engine):
    return launch(train, WORLD_SIZE, args=(make_engine, STEPS), device=DEVICE, link=LINK)


timelines, rows = {}, {}  # by name: a cell that runs twice replaces its row


def measure(name, make_engine):
    """Runs an engine on the link; adds a row to the table and a line to the comparison."""
    run = run_on_link(make_engine)
    steps = [timeline_of(run, step=step, title=name) for step in range(1, STEPS)]
    # The quickest one: whatever else the machine does can only make a step slower.
    timelines[name] = min(steps, key=lambda one: one.seconds)
    calls = [call for call in run.calls[0] if call.op == "all_reduce"]
    one = timelines[name].ranks[0]
    rows[name] = {
        "engine": name,
        "all_reduce calls a step": len(calls) / STEPS,
        "bytes sent a step": round(sum(call.sent for call in calls) / STEPS),
        "link busy (ms)": 1e3 * one.communication_seconds,
        "hidden, rank 0": f"{one.hidden_share:.0%}",
        "step (ms)": 1e3 * timelines[name].seconds,
    }
    return run


# %% [markdown]
# **Predict.** How long will the link be busy in one step, with one call for each of the P parameters? The two numbers
# are above. And which share of that will be hidden behind computation?

# %%
busy = predict("the link is busy, lab 03's way (ms)", N=WORLD_SIZE, P=P)

# %%
hidden_after = predict("share hidden, lab 03's way (0 to 1)")

# %%
run = measure("after backward", AfterBackward)
busy.compare(1e3 * timelines["after backward"].ranks[0].communication_seconds)

# %%
hidden_after.compare(timelines["after backward"].ranks[0].hidden_share)

# %%
show(timelines["after backward"])

# %% [markdown]
# Two lanes for each rank: what it computes, and what its link carries. They take turns. The hidden share is the part of
# the link's busy time during which the same rank computes, and here it is nothing. The table and `compare` below give
# rank 0's share, the line above the lanes that of all ranks together.
#
# Between the moment in which a rank issues a call and the moment in which its link begins there may be a gap, although
# the link is free: a collective begins only when the last rank has joined.
#
# How good could it be? In the forward pass there is nothing to send yet. From then on the processor is busy with
# backward, and the link with the gradients. If those two worked side by side, a step would take forward +
# max(backward, link), instead of forward + backward + link.
#
# ## 3. Hooks: do something when a gradient is ready
#
# A function that autograd calls at a certain moment is called a **hook**. We need the moment in which a parameter's
# gradient is complete and stands in `.grad`:
#
# ```python
# parameter.register_post_accumulate_grad_hook(function)  # autograd calls function(parameter)
# ```
#
# The name tells when: **after** the new gradient has been added (accumulated) to what was in `.grad`. The hook gets the
# parameter, not the gradient: a common mistake is to average the parameter.
#
# The first try: in the hook, all-reduce this one gradient.


# %%
class BlockingHooks(Replica):
    """Every gradient is reduced in the moment in which it is ready, and backward waits for it."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)  # returns when the sum is there

    def backward(self, loss):
        loss.backward()


# %% [markdown]
# **Predict.** Communication now happens *during* the backward pass. Which share of it is hidden?

# %%
hidden_blocking = predict("share hidden, blocking hooks (0 to 1)")

# %%
run = measure("blocking hooks", BlockingHooks)
hidden_blocking.compare(timelines["blocking hooks"].ranks[0].hidden_share)

# %%
show(timelines["blocking hooks"])

# %% [markdown]
# Nothing is hidden, and no time is gained. The hook runs *inside* the backward pass, in its thread. While it waits for
# the sum, no layer computes. Sending early is not enough: somebody must not wait.
#
# ## 4. Asynchronous: start now, wait later
#
# `dist.all_reduce(tensor, async_op=True)` starts the operation and returns at once with a **handle**. `handle.wait()`
# returns when it is done. Between the two, the tensor belongs to the operation: do not read it, do not write to it.


# %%
class AsynchronousHooks(Replica):
    """Every gradient leaves when it is ready; the waiting comes after backward."""

    def __init__(self, module):
        super().__init__(module)
        self.handles = []
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def backward(self, loss):
        loss.backward()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


run = measure("asynchronous hooks", AsynchronousHooks)
show(timelines["asynchronous hooks"])

# %%
behind, in_all = DEEP.layers * BLOCK, P * CALL + BYTES
print(f"backward {theory.format_seconds(behind)}, link {theory.format_seconds(in_all)}")
print(f"hidden: about {min(behind / in_all, 1):.0%} by these numbers")

# %%
table(list(rows.values()))

# %% [markdown]
# Now the lanes overlap. What can be hidden is what fits behind backward: its pauses, over the time of the link, are the
# share printed above. A little less is hidden, since the link must wait for the first block. On a machine with much
# else to do backward lasts longer than its pauses: then there is more to hide behind, and the measured share is larger.
#
# But look at how long the link is busy: nearly the same in all three rows, P calls at their price. Most of that price
# is latency. A bias vector of 64 elements pays as much for its call as a matrix of 16,384.
#
# ### Break it on purpose: wait for the last one only
#
# "The operations run one after the other. So when the last is done, all are." It sounds right, it passes most tests on
# a quiet machine, and it is not what the library promises: a result is there after `wait()` of *its own* handle. On a
# GPU a wait also tells the stream that computes to wait, and with several streams or groups the order is anything.
#
# `launch(..., slow_ranks=...)` makes all operations of some ranks complete as late as they may. Until then their
# tensors hold NaN, "not a number".


# %%
def two_reductions(wait_for):
    tensors = [torch.full((2,), float(dist.get_rank())) for _ in range(2)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in wait_for:
        handles[number].wait()
    return tensors


for wait_for in ([0, 1], [1], []):
    run = launch(
        two_reductions,
        WORLD_SIZE,
        args=(wait_for,),
        device="cpu",
        slow_ranks=range(WORLD_SIZE),
    )
    first, second = run.results[0]
    print(f"waits for {wait_for!s:7}: first {first.tolist()}, second {second.tolist()}")

# %% [markdown]
# The check of your DDP runs on such ranks. A wait that is missing fails there every time, not now and then.
#
# ## 5. Buckets
#
# The way out is between the two extremes. One message per parameter: P times the latency. One message for all: it can
# leave only when the very last gradient is ready, and then there is nothing left to hide behind. So collect gradients
# until they fill a **bucket**, send it, and fill the next one (Li et al. 2020, section 3.2.2 and 3.2.3).
#
# A bucket is one flat tensor, so its gradients must have one dtype. All ranks must fill alike, before any gradient is
# there: the plan is made from the parameters alone. And the order matters. A bucket is complete when its *last*
# gradient is ready, so parameters whose gradients come at about the same time should be in one bucket.
#
# ### Exercise 05.plan_buckets
#
# *Difficulty: easy to medium. Importance: high, ZeRO plans its buckets in the same way. Give it 15 minutes.*
#
# **Contract.** `plan_buckets(parameters, bucket_bytes)` gets a list of parameters, in the order in which their
# gradients are expected. It returns a list of buckets. A bucket is a list of **indices** into `parameters`.
#
# - Every index is in exactly one bucket. All parameters of a bucket have one dtype.
# - Buckets of a dtype are filled front to back, in the order of the list. A bucket holds at most `bucket_bytes` bytes
#   (exactly full is fine), and is closed only when the next parameter *of its dtype* does not fit.
# - A parameter larger than `bucket_bytes` has a bucket to itself. So with `bucket_bytes` of 0 or 1 each parameter has.
# - The buckets come in the order in which they can be complete: by their last index.
# - No parameters, no buckets: `[]`.
#
# For example: 40, 40, 40 and 200 bytes in buckets of 100 make `[[0, 1], [2], [3]]`.
#
# <details><summary>Hint 1: bytes</summary>
#
# `parameter.numel()` counts elements, `parameter.element_size()` the bytes of one. There is also `parameter.nbytes`.
# </details>
#
# <details><summary>Hint 2: several dtypes</summary>
#
# Parameters of two dtypes may alternate in the list. One open bucket for each dtype: a dict from the dtype to the
# bucket that is being filled, and to the bytes it holds.
# </details>
#
# <details><summary>Hint 3: the order at the end</summary>
#
# Put a bucket into the result when it is opened; it is a list, so it can still be filled there. At the end:
# `sorted(buckets, key=lambda bucket: bucket[-1])`.
# </details>
#
# <details><summary>Hint 4: almost the answer</summary>
#
# ```python
# buckets, filling, held = [], {}, {}  # by dtype: the open bucket, the bytes in it
# for index, parameter in enumerate(parameters):
#     dtype = parameter.dtype
#     if dtype not in filling or ...:
#         filling[dtype], held[dtype] = [], 0
#         buckets.append(filling[dtype])
#     ...
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "plan_buckets", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def plan_buckets(parameters, bucket_bytes):
    """Buckets of one dtype and at most `bucket_bytes` bytes, as lists of indices (Li et al. 2020, 3.2.2).

    parameters: tensors, in the order in which their gradients are expected. One that is larger has
    a bucket to itself.
    """
    ### BEGIN SOLUTION
    buckets, filling, held = [], {}, {}  # by dtype: the open bucket, the bytes in it
    for index, parameter in enumerate(parameters):
        dtype = parameter.dtype
        if dtype not in filling or held[dtype] + parameter.nbytes > bucket_bytes:
            filling[dtype], held[dtype] = [], 0
            buckets.append(filling[dtype])
        filling[dtype].append(index)
        held[dtype] += parameter.nbytes
    return sorted(buckets, key=lambda bucket: bucket[-1])
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-plan_buckets", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("05.plan_buckets", plan_buckets)

# %% [markdown]
# What it makes of the GPT, for a few sizes. The link's time follows from the number of buckets alone: each pays for a
# call, and the bytes are the same.

# %%
# NBVAL_CHECK_OUTPUT
in_order = list(reversed(list(GPT(DEEP).parameters())))
SIZES = [1, 50_000, 200_000, 400_000, 10**9]
table(
    [
        {
            "bucket_bytes": size,
            "buckets": len(plan),
            "largest (bytes)": max(sum(in_order[i].nbytes for i in bucket) for bucket in plan),
        }
        for size in SIZES
        for plan in [plan_buckets(in_order, size)]
    ],
    title=f"{P} parameters, {NBYTES:,} bytes",
)

# %% [markdown]
# ## 6. Your DDP
#
# The pieces that you get: `Bucket` is a flat tensor with a place for each of its gradients, and `views`, which are
# those places in the parameters' shapes. `fill` puts a gradient there, divided by N, so that the sum over the ranks is
# the mean (dividing *before* the sum keeps float16 from overflowing, see lab 03). A parameter without a gradient counts
# as zeros.


# %% tags=["export"]
class Bucket:
    """A few parameters of one dtype, and a flat tensor for their gradients: as many bytes again."""

    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].detach().new_empty(sum(sizes))
        places = zip(self.flat.split(sizes), parameters, strict=True)
        self.views = [piece.view(parameter.shape) for piece, parameter in places]
        self.clear()

    def clear(self):
        """Before a backward pass."""
        self.missing = set(range(len(self.parameters)))  # places that are not filled yet
        self.handle = None  # of the reduction, once it is under way
        self.stale = False  # whether a gradient has changed since the bucket left

    def fill(self, place):
        gradient = self.parameters[place].grad
        if gradient is None:
            self.views[place].zero_()
        else:
            torch.div(gradient, dist.get_world_size(), out=self.views[place])


# %% [markdown]
# **When may a bucket leave?** When nothing is missing in it, and when all buckets before it have left. The second
# condition is there because ranks must agree. Collective calls have no names: the third call of one rank meets the
# third call of the others. Two ranks may complete buckets in different orders, for instance because they took different
# branches. If each sent what is complete first, the sum would add up the gradients of different parameters. So buckets
# leave in the order of the plan, on every rank.
#
# ### What breaks when ranks differ
#
# Here is a model with two branches, and the asynchronous hooks of section 4. Rank 0 takes the left branch, the others
# the right one. Before you run it: which calls does each rank make?


# %%
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, inputs, branches):
        hidden = self.stem(inputs)
        for branch in branches:
            hidden = getattr(self, branch)(hidden)
        return hidden


def branch_out(make_engine, of_rank_0, of_others):
    """The mean gradient of each layer, as this rank has it: its first element, or None."""
    torch.manual_seed(SEED)
    engine = make_engine(Branches())
    branches = of_rank_0 if dist.get_rank() == 0 else of_others
    loss = engine(torch.ones(2, 4), branches).sum()
    engine.backward(loss)
    model = engine.module
    return {
        name: None if parameter.grad is None else round(parameter.grad[0, 0].item(), 4)
        for name, parameter in model.named_parameters()
    }


def show_branches(make_engine, of_rank_0, of_others):
    arguments = (make_engine, of_rank_0, of_others)
    run = launch(branch_out, WORLD_SIZE, args=arguments, device="cpu")
    return table([{"rank": rank, **result} for rank, result in enumerate(run.results[:2])])


show_branches(AsynchronousHooks, ["left"], ["right"])

# %% [markdown]
# No error, and wrong. Every rank made two calls of equal size. The first call of rank 0 carried the gradient of *left*,
# and that of the others the gradient of *right*; they were added up. And each rank has None where others have a
# gradient, so its optimizer does not move that layer: the replicas part.
#
# Now rank 0 uses both branches, so it makes one call more than the others.

# %%
try:
    show_branches(AsynchronousHooks, ["left", "right"], ["right"])
except LaunchError as report:
    print(report)

# %% [markdown]
# Either way the cure is the same: **every rank sends every bucket in every step, in one order**, whatever it has used.
#
# Two questions are left that only all ranks together can answer, when backward is over:
#
# - Has *any* rank a gradient for this parameter? If not, one process would leave `.grad` at None, and `present` lets
#   you do the same. Zeros on all ranks are allowed too, and simpler; but an optimizer with weight decay or momentum
#   moves a parameter even when its gradient is zeros.
# - Has *any* rank changed a gradient after its bucket had left? That is rare, but it happens: **gradient
#   checkpointing** saves memory by computing a layer's forward again during backward. In its older ("re-entrant") form
#   it runs a backward inside the backward, and a layer that is used in two checkpoints gets its gradient in two parts.
#   The hook is called twice. If the bucket left after the first call, its sum is **stale**, and all ranks must reduce
#   it once more.
#
# So each rank writes down its answers as zeros and ones, and one small all-reduce adds them up. That is `agree` below.
#
# ### Exercise 05.DistributedDataParallel
#
# *Difficulty: hard, but in small pieces. Importance: very high. Give it 40 minutes.*
#
# **Contract.** Fill in three methods.
#
# - `arrived(bucket, place, parameter)` is called by a hook when the gradient of `bucket.parameters[place]`, which is
#   `parameter`, has been added to its `.grad`. It can be called twice in one pass (see above). Outside of this engine's
#   `backward`, or inside `no_sync()`, `self.reducing` is False: then do nothing. If the bucket has left already, it is
#   stale now. Otherwise fill the place, and launch every bucket whose turn it is. `self.waiting` is the list of buckets
#   that have not left, in their order.
# - `finish()` is called after every synchronised backward. It launches the rest, with the missing places filled (a
#   parameter that got no gradient *in this pass* may have one in `.grad` from an earlier one; `fill` handles both). It
#   calls `agree()`, waits for **each** handle, reduces stale buckets again, and puts the means into `.grad`: on every
#   rank, for every parameter that has a gradient on *some* rank. Where no rank has one: None or zeros, alike on all.
# - `no_sync()` is a context manager: inside it `self.synchronise` is False, and `backward` only adds up gradients
#   locally. Section 8 is about it. Afterwards everything is as before, also after an exception, and also when it was
#   False before: one `no_sync()` may stand inside another.
# - `backward(loss)` is written for you, and so is `launch`.
#
# The mean is of what has been **accumulated** in `.grad`, also by earlier backward passes. Reductions go through
# `self.all_reduce(flat)`, which returns a handle with `wait()`.
#
# <details><summary>Hint 1: arrived</summary>
#
# Four lines after the two early returns: fill, take the place out of `bucket.missing`, and a loop: as long as there is
# a first bucket in `self.waiting` and nothing is missing in it, take it out and launch it. Why a loop, and not an `if`?
# </details>
#
# <details><summary>Hint 2: finish</summary>
#
# In this order: (1) for each bucket still in `self.waiting`: fill what is in `bucket.missing`, launch. (2) `present,
# stale = self.agree()`. (3) For each bucket: wait; if it is stale, fill *all* its places again, launch, wait. That is
# safe, because `.grad` still holds this rank's own gradients. (4) Only now copy `view` into `parameter.grad`.
# </details>
#
# <details><summary>Hint 3: a gradient that is not there</summary>
#
# `parameter.grad.copy_(view)` needs a `.grad`. A parameter that other ranks used and this one did not has none:
# `parameter.grad = view.clone()`. Not the view itself: when gradients are kept or set to zero instead of None, the next
# backward adds right into the bucket. A hook that is called twice then changes what is divided already, or on its way.
# </details>
#
# <details><summary>Hint 4: no_sync</summary>
#
# ```python
# before, self.synchronise = self.synchronise, False
# try:
#     yield
# finally:
#     self.synchronise = ...
# ```
# </details>
#
# <details><summary>Hint 5: almost the answer</summary>
#
# ```python
# def arrived(self, bucket, place, parameter):
#     if not self.reducing:
#         return
#     if bucket.handle is not None:
#         ...
#         return
#     bucket.fill(place)
#     bucket.missing.discard(place)
#     while self.waiting and not self.waiting[0].missing:
#         self.launch(...)
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "DistributedDataParallel", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class DistributedDataParallel(Replica):
    """Reduces gradients in buckets while backward computes the next (Li et al. 2020, 3.2 and 4.2).

    Sends 2(N-1)/N n bytes a step, in a call per bucket and one for flags. Holds the gradients a
    second time.
    """

    def __init__(self, module, bucket_bytes=25 * 2**20, all_reduce=None):
        """all_reduce(flat) starts the sum over all ranks, in place, and returns what has wait()."""
        super().__init__(module)
        self.all_reduce = all_reduce or partial(dist.all_reduce, async_op=True)
        self.reducing = False  # hooks are always there, but act only in this engine's backward
        plan = plan_buckets(self.trained, bucket_bytes)
        self.buckets = [Bucket([self.trained[index] for index in indices]) for indices in plan]
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = partial(self.arrived, bucket, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def backward(self, loss):
        if not self.synchronise:
            loss.backward()
            return
        for bucket in self.buckets:
            bucket.clear()
        self.waiting = list(self.buckets)  # those that have not left, in the order of the plan
        self.reducing = True
        try:
            loss.backward()
        finally:  # also after an exception every bucket leaves, or the other ranks would wait for ever
            self.reducing = False
            self.finish()

    def launch(self, bucket):
        bucket.handle = self.all_reduce(bucket.flat)

    def arrived(self, bucket, place, parameter):
        """A hook: the gradient of `bucket.parameters[place]` has been added to its `.grad`."""
        ### BEGIN SOLUTION
        if not self.reducing:
            return
        if bucket.handle is not None:
            bucket.stale = True  # its flat tensor is on its way: hands off
            return
        bucket.fill(place)
        bucket.missing.discard(place)
        while self.waiting and not self.waiting[0].missing:
            self.launch(self.waiting.pop(0))
        ### END SOLUTION

    @torch.no_grad()
    def finish(self):
        """After backward: sends what has not left, waits, and puts the means into `.grad`."""
        ### BEGIN SOLUTION
        for bucket in self.waiting:
            for place in bucket.missing:
                bucket.fill(place)
            self.launch(bucket)
        present, stale = self.agree()
        for bucket, again in zip(self.buckets, stale, strict=True):
            bucket.handle.wait()
            if again:
                for place in range(len(bucket.parameters)):
                    bucket.fill(place)
                self.launch(bucket)
                bucket.handle.wait()
        for bucket in self.buckets:
            for parameter, mean in zip(bucket.parameters, bucket.views, strict=True):
                if not present[parameter]:
                    continue
                if parameter.grad is None:
                    # Not the view itself: the next gradient would be added right into the bucket.
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)
        ### END SOLUTION

    def agree(self):
        """What is true on any rank: has a gradient (dict by parameter), is stale (list, by bucket)."""
        mine = [each.grad is not None for each in self.trained]
        mine += [bucket.stale for bucket in self.buckets]
        if not mine:
            return {}, []
        flags = torch.tensor(mine, dtype=torch.float32, device=self.trained[0].device)
        self.all_reduce(flags).wait()
        anywhere = [count > 0 for count in flags.tolist()]
        return dict(zip(self.trained, anywhere, strict=False)), anywhere[len(self.trained) :]

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, backward() sends nothing: gradients add up until one outside."""
        ### BEGIN SOLUTION
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-DistributedDataParallel", "locked": true, "points": 10, "schema_version": 3, "solution": false, "task": false}
check("05.DistributedDataParallel", DistributedDataParallel)

# %% [markdown]
# The model from above on your DDP, in both cases: nobody waits for ever, and all ranks end with the same means.

# %%
show_branches(DistributedDataParallel, ["left"], ["right"])

# %%
show_branches(DistributedDataParallel, ["left", "right"], ["right"])

# %% [markdown]
# ## 7. The time line of your own DDP
#
# **Predict.** With this many buckets, how long is the link busy in a step? (There is one more call, with P flags and
# one per bucket. It is as good as empty.)

# %%
BUCKETS = len(plan_buckets(in_order, BUCKET_BYTES))
print(f"{BUCKETS} buckets of at most {BUCKET_BYTES:,} bytes")
print(f"{theory.format_seconds(CALL)} a call, {theory.format_seconds(BYTES)} for all bytes")
busy_in_buckets = predict("the link is busy, in buckets (ms)", buckets=BUCKETS)

# %%
in_buckets = partial(DistributedDataParallel, bucket_bytes=BUCKET_BYTES)
run = measure("in buckets", in_buckets)
busy_in_buckets.compare(1e3 * timelines["in buckets"].ranks[0].communication_seconds)

# %% tags=["picture"]
show(timelines["in buckets"])

# %%
compare(timelines, rank=0)

# %%
table(list(rows.values()))

# %% [markdown]
# Hidden is what the link carries while the rank computes. Three things are left over. The last bucket holds the
# gradients of the first layers, which are ready when backward ends. Buckets that were issued earlier may still be
# queued before it. And the call with the flags comes after backward by its nature: it costs $2(N-1)\,\alpha$, six
# latencies with four ranks, and is always exposed. There is nothing to hide these behind, except the optimizer.
#
# The number of calls and the bytes do not depend on time, so they can be predicted to the last one:


# %%
# NBVAL_CHECK_OUTPUT
def flags_of(buckets):
    """Elements of the one call that is no bucket: a flag per parameter and per bucket."""
    return P + buckets


share = 2 * (WORLD_SIZE - 1) / WORLD_SIZE
expected = {
    "after backward": (P, share * NBYTES),
    "blocking hooks": (P, share * NBYTES),
    "asynchronous hooks": (P, share * NBYTES),
    "in buckets": (BUCKETS + 1, share * (NBYTES + 4 * flags_of(BUCKETS))),
}
table(
    [
        {
            "engine": row["engine"],
            "calls predicted": expected[row["engine"]][0],
            "calls": row["all_reduce calls a step"],
            "bytes predicted": round(expected[row["engine"]][1]),
            "bytes": row["bytes sent a step"],
        }
        for row in rows.values()
        if row["engine"] in expected
    ],
    equal=("bytes predicted", "bytes"),
)

# %% [markdown]
# ### How large should a bucket be?
#
# **Predict.** Sketch the curve: the exposed time of the link against the bucket size, from one parameter per bucket to
# one bucket for all. Where is it lowest? (A step's time follows it, but also whatever else the machine does.)

# %%
best_size = predict("best bucket size", unit="bytes", n=NBYTES)

# %%
SWEEP = [1, 20_000, 50_000, 100_000, 200_000, 400_000, 10**6]
swept = []
for size in SWEEP:
    run = run_on_link(partial(DistributedDataParallel, bucket_bytes=size))
    steps = [timeline_of(run, step=step) for step in range(1, STEPS)]
    count = len(plan_buckets(in_order, size))
    swept.append(
        {
            "bucket_bytes": size,
            "buckets": count,
            "link busy, predicted (ms)": 1e3 * ((count + 1) * CALL + BYTES),
            "link busy (ms)": 1e3
            * median(rank.communication_seconds for one in steps for rank in one.ranks),
            "hidden": f"{median(one.hidden_share for one in steps):.0%}",
            "exposed (ms)": 1e3 * median(one.exposed for one in steps),
            "step (ms)": 1e3 * min(one.seconds for one in steps),
        }
    )
table(swept)

# %%
charts.steps_against(
    [row["buckets"] for row in swept],
    {
        "step": [row["step (ms)"] for row in swept],
        "link busy": [row["link busy (ms)"] for row in swept],
        "of that exposed": [row["exposed (ms)"] for row in swept],
    },
    xlabel="buckets in a step",
    ylabel="milliseconds",
)

# %%
best_size.compare(min(swept, key=lambda row: row["exposed (ms)"])["bucket_bytes"])

# %% [markdown]
# On the right of the picture the link drowns in calls: it is busy longer than backward lasts, and whatever does not fit
# behind it is exposed. On the very left a single bucket waits for the last gradient, and everything is exposed. In
# between lies a flat valley. Its place depends on the link and on the model: torch's default of 25 MiB is meant for
# large models and fast networks. For this GPT it would be one bucket, and hide nothing.
#
# ## 8. Accumulation: do not send what you do not need
#
# Often a batch is too large for the memory, and is computed in k **micro-steps**: k times forward and backward, which
# add up gradients in `.grad`, then one optimizer step. Averaging is linear: the mean of the sums is the sum of the
# means. So it is enough to reduce once, in the last micro-step. All the others go inside `no_sync()`.


# %%
def accumulate(micro_steps, with_no_sync):
    """One optimizer step in micro-steps. Returns the gradients."""
    torch.manual_seed(SEED + dist.get_rank())
    model = GPT(SMALL).to(device())
    ddp = DistributedDataParallel(model, bucket_bytes=BUCKET_BYTES)
    for micro_step in range(micro_steps):
        inputs, targets = part_of(micro_step, device())
        last = micro_step == micro_steps - 1
        with ddp.no_sync() if with_no_sync and not last else contextlib.nullcontext():
            ddp.backward(loss_function(ddp(inputs), targets) / micro_steps)
    return [parameter.grad.cpu() for parameter in model.parameters()]


# %% [markdown]
# **Predict.** Four micro-steps, every one synchronised, against one reduction at the end: how many times as many bytes?

# %%
factor = predict("bytes without no_sync, divided by bytes with it, 4 micro-steps")

# %%
every, once = (
    launch(accumulate, WORLD_SIZE, args=(4, with_no_sync), device=DEVICE)
    for with_no_sync in (False, True)
)


def reduced(run):
    return run.traffic[0].by_operation["all_reduce"].sent


factor.compare(reduced(every) / reduced(once))

# %%
pairs = zip(every.results[0], once.results[0], strict=True)
print("all_reduce bytes, every micro-step:", f"{reduced(every):,.0f}")
print("all_reduce bytes, last one only:   ", f"{reduced(once):,.0f}")
largest = max((a - b).abs().max().item() for a, b in pairs)
print(f"largest difference of a gradient:   {largest:.1e}")

# %% [markdown]
# Equal but for rounding. What must not be forgotten: a parameter that only an *earlier* micro-step used gets no hook in
# the last one, and still has something in `.grad` that must be averaged. Your `finish` fills what is missing from
# `.grad`, so it is there.
#
# ## 9. Plug in your own ring
#
# `DistributedDataParallel(..., all_reduce=...)` takes any function that starts a sum and returns something with
# `wait()`. Your `ring_all_reduce` of lab 04 does not return before it is done. To run it in the background it needs a
# thread of its own. **One** thread: it takes the buckets in the order in which they were launched, so that all ranks'
# rings work on the same bucket at the same time.


# %% tags=["export"]
class InBackground:
    """Makes a blocking all-reduce asynchronous: one thread runs the calls, one after the other."""

    def __init__(self, all_reduce):
        self.all_reduce = all_reduce
        self.thread = ThreadPoolExecutor(max_workers=1)

    def __call__(self, flat):
        return Pending(self.thread.submit(self.all_reduce, flat))


class Pending:
    def __init__(self, future):
        self.future = future

    def wait(self):
        self.future.result()  # also raises what the thread has raised


# %%
ring_all_reduce = reuse("04_ring_all_reduce").ring_all_reduce


def on_own_ring(model):
    # Made here, on the rank: a thread cannot be sent from one process to another.
    ring = InBackground(ring_all_reduce)
    return DistributedDataParallel(model, bucket_bytes=BUCKET_BYTES, all_reduce=ring)


own = launch(train, WORLD_SIZE, args=(on_own_ring, STEPS), device=DEVICE)
library = launch(train, WORLD_SIZE, args=(in_buckets, STEPS), device=DEVICE)


def difference(one, other):
    pairs = zip(one.results[0], other.results[0], strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


print("calls on the ring:", sorted(own.traffic[0].by_operation))
print(f"largest difference of a gradient: {difference(own, library):.1e}")

# %% [markdown]
# The library's bytes are booked by formula, those of your ring are measured message by message. With chunks that N does
# not divide, ranks differ by a few elements, so the mean over the ranks is compared.


# %%
# NBVAL_CHECK_OUTPUT
def sent_by(run, *operations):
    """Bytes that a rank sends in a step by these operations, the mean over the ranks."""
    totals = [rank.by_operation[op].sent for rank in run.traffic for op in operations]
    return round(sum(totals) / WORLD_SIZE / STEPS)


table(
    [
        {
            "bytes predicted": round(share * (NBYTES + 4 * flags_of(BUCKETS))),
            "your ring, measured": sent_by(own, "send"),
            "library, booked": sent_by(library, "all_reduce"),
        }
    ],
    equal=("bytes predicted", "your ring, measured"),
)

# %% [markdown]
# ## 10. Beside torch's own
#
# `torch.nn.parallel.DistributedDataParallel` does the same in C++. It hooks itself into autograd, so one calls
# `loss.backward()` as ever. `bucket_cap_mb` is its bucket size, in MiB.


# %%
class Torchs(torch.nn.Module):
    """torch's DDP in the shape of this lab."""

    def __init__(self, model, **options):
        super().__init__()
        self.ddp = torch.nn.parallel.DistributedDataParallel(model, **options)
        self.module = model

    def forward(self, *inputs):
        return self.ddp(*inputs)

    def backward(self, loss):
        loss.backward()


torchs = partial(Torchs, bucket_cap_mb=BUCKET_BYTES / 2**20)
theirs = measure("torch's DDP", torchs)
yours = run_on_link(in_buckets)
print(f"largest difference of a gradient after {STEPS} steps: {difference(yours, theirs):.1e}")

# %%
compare({"yours": timelines["in buckets"], "torch's": timelines["torch's DDP"]}, rank=0)


# %%
def of_gradients(run, step):
    """all_reduce calls of one step that carry gradients, on rank 0: all but that of your flags."""
    calls = [call for call in run.calls[0] if call.op == "all_reduce"]
    calls = [call for call in calls if call.numel != flags_of(BUCKETS)]
    per_step = [[]]
    for call in calls:
        if sum(one.numel for one in per_step[-1]) >= sum(PARAMETERS):
            per_step.append([])
        per_step[-1].append(call)
    return per_step[step]


table(
    [
        {
            "engine": name,
            "step": step,
            "reductions of gradients": len(of_gradients(run, step)),
            "bytes sent": round(sum(call.sent for call in of_gradients(run, step))),
        }
        for name, run in (("yours", yours), ("torch's", theirs))
        for step in (0, STEPS - 1)
    ]
)

# %% [markdown]
# The same bytes, the same gradients but for rounding. But look at torch's first step: a single reduction, whatever
# `bucket_cap_mb` says. torch notes in that step in which order the gradients really arrive, and plans its buckets
# afterwards, in that order. (It closes a bucket when its size has been *reached*, you before it would be exceeded: the
# counts may differ by one or two.)
#
# Your DDP sends one call more, with the flags. torch's does so only if you ask it, with `find_unused_parameters=True`;
# without that, a parameter that gets no gradient is an error in the next step.
#
# How fast is yours? `make bench` trains a GPT of 10 million parameters with both, in turns in one run, without a link,
# and demands that yours takes no more than 1.05 times as long.
#
# ## 11. The ledger
#
# The same small GPT as in the other labs, in float16 with the engine of lab 01. Its gradients carry the loss scale, so
# the scaled loss is what goes into `ddp.backward`.

# %%
states = reuse("01_model_states")


def train_in_halves(steps):
    """Bytes of model states that this rank holds between two steps."""
    torch.manual_seed(SEED)
    model = GPT(SMALL).to(device()).half()
    ddp = DistributedDataParallel(model, bucket_bytes=BUCKET_BYTES // 4)
    engine = states.MixedPrecisionAdam(model.parameters())
    for step in range(steps):
        engine.zero_grad()
        inputs, targets = part_of(step, device())
        ddp.backward(loss_function(ddp(inputs), targets) * engine.scale)
        engine.step()
    return sum(states.model_state_bytes(model, engine).values())


steps, psi = 2, GPT(SMALL).parameter_count
run = launch(train_in_halves, WORLD_SIZE, args=(steps,), device=DEVICE)
busiest = max(run.traffic, key=lambda rank: rank.by_operation["all_reduce"].sent)
reduced_in_halves = busiest.by_operation["all_reduce"]
record(
    LedgerRow(
        lab="05",
        strategy="DDP, buckets",
        world_size=WORLD_SIZE,
        held=max(run.results),
        held_formula=theory.model_state_bytes("ddp", psi, WORLD_SIZE),
        sent=reduced_in_halves.sent / steps,
        sent_formula=2 * theory.step_volume("ddp", psi, WORLD_SIZE).sent,  # 2 bytes each
        messages=reduced_in_halves.calls // steps,
        limited_by="the last bucket; a copy of all gradients",
    )
)

# %% [markdown]
# The bytes of the model states are those of lab 03, 16$\psi$ on every rank, and so is what is sent, but for the flags.
# At N = 4 they are 216 bytes more than the formula has: 210 for the flags of `agree`, and 6 for the one number with
# which the engine of lab 01 decides on all ranks alike whether to skip. Lab 03's rows hold those 6 too. Lab 04's does
# not, because it counts the messages of the ring alone.
#
# Overlap changes *when* bytes travel, not how many. The buckets are a second copy of the gradients, 2$\psi$ bytes more,
# which the column does not count: they are no model states. ZeRO, from lab 06 on, attacks the 16$\psi$.
#
# ## 12. What production systems do differently
#
# - **torch's reducer** (Li et al. 2020, section 4.2) makes the **first bucket smaller** by default (1 MiB of 25), so
#   that communication starts sooner, and **rebuilds** the buckets after the first step in the order in which gradients
#   arrived.
# - `find_unused_parameters=True` walks through the graph before every backward, and marks what cannot get a gradient as
#   ready at once. Your DDP learns it only at the end, so an unused parameter holds its bucket back, and all behind it.
#   `static_graph=True` promises that every step is alike, so that one look is enough; then hooks may also be called
#   twice.
# - `gradient_as_bucket_view=True` makes `.grad` a view of the bucket. That saves your second copy of the gradients, and
#   needs care with everything that writes to `.grad`.
# - On GPUs the reduction runs on a **stream** of its own. `wait()` does not stop Python there; it makes the computing
#   stream wait. A **communication hook** can replace the all-reduce, for instance by one in bfloat16.
# - **DeepSpeed** overlaps in the same way with `overlap_comm` and `reduce_bucket_size`. **FSDP** reduces each block's
#   gradients with a reduce-scatter as soon as they are ready, and gathers the next block's parameters meanwhile: labs
#   07 and 08.
#
# ## 13. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** Why are buckets filled in the reverse order of the model's parameters? What happens to your DDP when a model
# runs its layers in another order than it defines them: is it wrong, or slow?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-order", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Gradients come in the reverse order of the forward pass, which mostly is the order of definition. In another order the
# values are right all the same, because a bucket leaves only when all its gradients are there. But the first bucket may
# be complete late, and all others wait behind it: less is hidden.

# %% [markdown]
# **Q2.** Backward takes 100 ms, and the link needs 80 ms for all gradients, in 10 equal buckets that become ready one
# every 10 ms. How long does a step's backward take with its communication, and which share is hidden? And if the link
# needs 200 ms?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-time", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Each bucket needs 8 ms, less than the 10 ms until the next one. The last is ready at 100 ms and done at 108 ms; 72 of
# 80 ms are hidden, 90 %. With 200 ms each bucket needs 20 ms. The link starts at 10 ms and is busy without a break
# until 210 ms; 90 of 200 ms are hidden, 45 %. Then only a faster link or fewer bytes help.

# %% [markdown]
# **Q3.** Somebody puts the flags of `agree` into the first bucket, to save a call. Why does that not work? Where could
# they travel?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-flags", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# When the first bucket leaves, nobody knows yet which parameters of later buckets will get a gradient, nor which bucket
# will be stale. The last bucket could carry them, if it leaves only when backward is over.

# %% [markdown]
# **Q4.** With k micro-steps, all but the last in `no_sync()`: how much *time* of communication can be hidden behind
# computation? And which *share* of the optimizer step's time is then exposed, against k synchronised micro-steps?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-accumulation", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# At most as much time as the backward of the last micro-step lasts: what was exposed in one synchronised micro-step is
# exposed here as well. But it comes once instead of k times, so its share of the computing time is a k-th.

# %% [markdown]
# ## Sources
#
# - S. Li et al.: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, arXiv
#   2006.15704: sections 3.2.1 (a call per parameter), 3.2.2 (buckets), 3.2.3 (overlap, parameters without gradients)
#   and 3.2.4 (accumulation), figure 3 (why ranks must agree on an order), section 4.2 (the reducer), figures 7 and 8
#   (time against bucket size).
# - PyTorch documentation: `torch.nn.parallel.DistributedDataParallel` (bucket_cap_mb, find_unused_parameters,
#   static_graph, gradient_as_bucket_view, no_sync), and the design note *Distributed Data Parallel*.
# - PyTorch documentation: `torch.Tensor.register_post_accumulate_grad_hook`, `torch.utils.checkpoint` (use_reentrant).
# - R. Thakur, R. Rabenseifner, W. Gropp: *Optimization of collective communication operations in MPICH*, IJHPCA 19(1),
#   2005: the alpha-beta model.
# - A. Sergeev, M. Del Balso: *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018, arXiv 1802.05799:
#   section 6: tensor fusion, the same idea as buckets.

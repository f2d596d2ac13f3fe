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
# # 02 - Data parallelism in one process
#
# **You build:** `scatter`, `gather` and `DataParallel`, which trains one model on several devices from a single Python
# process, one thread per device. **Time:** 60 to 90 minutes.
#
# **Where this stands.** So far one device did everything. When a batch takes too long there, the obvious idea is to cut
# it: N devices take a part of the batch each, with a copy of the model each, at the same time. That is **data
# parallelism**. All later labs are forms of it. This lab builds the first one that became popular, PyTorch's
# `nn.DataParallel`: one process drives all devices. It is easy to use, and it does not scale. You will measure both.
#
# At the end you will know to the byte what every device sends, receives and holds, why device 0 is the bottleneck, and
# what Python itself adds to it. Lab 03 then does the same work in N processes.
#
# **How to work.** Run the cells from top to bottom. Where a cell says `not written yet`, it is your turn. Every
# exercise has a check right below it. Hints fold open one at a time. Before measurements there is a field for a
# prediction: write one down, even a wild one.
#
# **Letters.** N is the number of devices, B the number of samples in a batch, psi the number of parameters.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of devices in most cells, at least 2
DEVICE = "auto"  # "auto": GPUs if there are enough, else logical devices on the CPU
SEED = 0

# %% tags=["export"]
import copy
import threading

import torch

from shardlab import move, on

# %%
import os
import time

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardlab import check, launch, launch_devices, predict, reuse, show, table, theory
from shardlab.devices import device_of
from shardlab.errors import LaunchError
from shardlab.ledger import LedgerRow, record
from shardlab.meters import mark
from shardlab.model import GPT, SMALL, loss_function
from shardlab.text import batch
from shardlab.widgets import charts
from shardlab.widgets.device_traffic import device_traffic
from shardlab.widgets.state_bars import state_bars

PASSAGES, LENGTH = 24, 32  # a batch: 24 passages of 32 characters


def new_model(device, dtype=torch.float32):
    """The course's small GPT on a device, with the same first weights each time."""
    torch.manual_seed(SEED)
    return GPT(SMALL).to(dtype).to(device)


def batch_of(step, device, passages=PASSAGES):
    """Inputs and targets of one training step, on a device."""
    inputs, targets = batch(step, passages, LENGTH, SEED)
    return inputs.to(device), targets.to(device)


with torch.device("meta"):  # shapes only
    SHAPES = [parameter.shape for parameter in GPT(SMALL).parameters()]
TENSORS, PSI = len(SHAPES), sum(shape.numel() for shape in SHAPES)
print(f"psi = {PSI:,} parameters in {TENSORS} tensors, {4 * PSI:,} bytes in float32")

# %% [markdown]
# ## 1. One process, several devices
#
# `launch_devices(fn, devices=N)` starts **one** fresh process and calls `fn(devices)` in it. `devices` is a list of N
# devices. With N GPUs in the machine they are these. Otherwise they are **logical devices**: parts of the CPU's memory
# that behave like GPUs. A tensor lives on one device, the result of an operation lives where its inputs live, and an
# operation on tensors of two devices is an error. Three tools are all you need:
#
# - `move(tensor, device, "what it is")` gives the tensor on another device: a copy, and the bytes are counted. If it is
#   there already, you get the tensor itself, and nothing is counted. (`tensor.to(device)` does the same without a name
#   for the record, and `module.to(device)` takes a module there.)
# - `with on(device):` makes the current thread work on a device: new tensors land there.
# - `device_of(tensor)` tells where a tensor lives. It is this lab's; with GPUs you would read `tensor.device`.
#
# What comes from the *host* (the ordinary memory, where the data loader puts its batches) is not counted: it is no
# traffic between devices.


# %%
def first_steps(devices):
    weights = torch.ones(1000).to(devices[0])  # from the host
    copied = move(weights, devices[1], "weights")
    with on(devices[1]):
        noise = torch.randn(1000)
    total = copied + noise
    return [str(device_of(tensor)) for tensor in (weights, copied, noise, total)]


run = launch_devices(first_steps, 2, device=DEVICE)
print(run.results[0])
for one in run.traffic:
    print(f"device {one.rank} sent {one.sent:,} bytes and received {one.received:,}")

# %% [markdown]
# ### Break it on purpose: forget to move
#
# A copy of the model on device 1 and a batch on device 0 cannot meet. Real GPUs raise this error, and so do these.


# %%
def forget_to_move(devices):
    model = new_model(devices[1])
    inputs, _ = batch_of(0, devices[0])
    return model(inputs)


try:
    launch_devices(forget_to_move, 2, device=DEVICE)
except LaunchError as report:
    print(str(report).splitlines()[0])

# %% [markdown]
# ## 2. The plan
#
# The user's program should stay as it was: one model, one optimizer, both on device 0. So a training step goes like
# this:
#
# ```text
#                device 0                           devices 1 ... N-1
# 1  replicate   the model       -- parameters ->   a copy of the model
# 2  scatter     its samples     -- samples ---->   its samples
# 3  compute     forward, backward                  forward, backward
# 4  add up      all gradients   <- gradients ---   gradients
# 5  step        the optimizer steps                (the copy is thrown away)
# ```
#
# Step 3 happens on all devices at the same time. After step 5 the copies are out of date. The next step begins with
# fresh ones: that is how the new parameters reach the other devices.
#
# **Predict,** before you write it: the small GPT in float32, on N devices. How many bytes of gradients does device 0
# receive in one training step? And device 1, how many bytes of parameters? Section 6 compares.

# %%
gradients_in = predict(
    "bytes of gradients that device 0 receives per step", unit="bytes", N=WORLD_SIZE, psi=PSI
)

# %%
parameters_in = predict(
    "bytes of parameters that device 1 receives per step", unit="bytes", N=WORLD_SIZE, psi=PSI
)

# %% [markdown]
# ## 3. Scatter and gather
#
# ### Exercise 02.scatter
#
# *Difficulty: easy, with a trap. Importance: medium. Give it 10 minutes.*
#
# **Contract.** `tensor` lives on `devices[0]` and has B rows; `devices` is a list of N devices, which need not be
# numbered 0, 1, 2, ... Return a list of exactly N pieces: consecutive rows, in order, piece i on `devices[i]`. No row
# is lost or doubled. The largest piece has at most B/N rows, rounded up. When there are fewer rows than devices, some
# pieces have no rows. Nothing but its own piece travels to a device. Only the first dimension is cut.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Cut first, then move each piece. `zip(pieces, devices)` pairs them.
# </details>
#
# <details><summary>Hint 2: the trap</summary>
#
# Try what you cut with on 9 rows and 4 devices, and on 2 rows and 4 devices. How many pieces are there, how large is
# the largest, and is every row in one? Torch has more than one function that cuts: read what each promises about the number
# of pieces.
# </details>
#
# <details><summary>Hint 3: almost the answer</summary>
#
# ```python
# pieces = tensor.tensor_split(...)
# return [move(piece, device, "batch") for ...]
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "scatter", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def scatter(tensor, devices):
    """Cuts the rows of `tensor` into N consecutive pieces; piece i lives on devices[i]. Pieces may be empty."""
    ### BEGIN SOLUTION
    pieces = tensor.tensor_split(len(devices))
    return [move(piece, device, "batch") for piece, device in zip(pieces, devices, strict=True)]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-scatter", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("02.scatter", scatter)

# %% [markdown]
# ### Exercise 02.gather
#
# *Difficulty: easy. Importance: medium. Give it 5 minutes.*
#
# **Contract.** `pieces` is a list of at least one tensor, each on some device. Return one tensor on `device`: the rows
# of all pieces, in the order of the list. Pieces may have different numbers of rows, also none.
#
# <details><summary>Hint 1: a nudge</summary>
#
# An operation works within one device. So what must happen before the pieces can be joined?
# </details>
#
# <details><summary>Hint 2: joining</summary>
#
# `torch.cat` joins along the first dimension. `torch.stack` would make a new one, and needs pieces of one size.
# </details>
#
# <details><summary>Hint 3: almost the answer</summary>
#
# `torch.cat([move(...) for piece in pieces])`
# </details>


# %% nbgrader={"grade": false, "grade_id": "gather", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def gather(pieces, device):
    """Joins the rows of all pieces, in order, on `device`."""
    ### BEGIN SOLUTION
    return torch.cat([move(piece, device, "outputs") for piece in pieces])
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-gather", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("02.gather", gather)

# %% [markdown]
# ## 4. Two tools, ready made: replicas and threads
#
# A **replica** is a copy of the whole module on another device: its structure, its parameters, and its **buffers**
# (state that is no parameter, such as the running means of a BatchNorm layer). `copy.deepcopy` copies a module with
# everything that it keeps on `self`, so that two replicas share nothing. It keeps a dictionary of what it has copied
# already, the *memo*. Put the moved tensors in there first, and it takes these for the copies: nothing is copied twice, and
# device 0 never holds a second model. (`copy.deepcopy(module).to(device)` would give the same replica, by way of a copy
# on device 0.)


# %% tags=["export"]
def replicate(module, device):
    """A copy of the module on another device, which shares nothing with it.

    On the module's own device the copy has the module's memory: `move` gives what is there already.
    """
    memo = {}
    for parameter in module.parameters():
        moved = move(parameter.detach(), device, "parameters")
        memo[id(parameter)] = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = move(buffer, device, "buffers")
    return copy.deepcopy(module, memo)


# %% [markdown]
# Step 3 of the plan says "all at the same time". A Python program does several things at a time with **threads**:
# functions that run side by side in one process and see the same variables. This helper runs `work(0)`, `work(1)`, ...,
# each in a thread of its own, on its own device, and waits for all.
#
# Three details matter. Results go into a list **by number**, not in the order in which threads finish, which is chance.
# All threads are started before the first `join()` waits. And an exception ends only the thread in which it is raised:
# it must be carried over by hand. Otherwise Python prints it, and the caller goes on as if nothing had happened.


# %% tags=["export"]
def in_threads(work, devices):
    """Runs work(0), work(1), ... at the same time, one thread per device. Returns their results, by number."""
    results, errors = [None] * len(devices), []

    def run(number):
        try:
            with on(devices[number]):
                results[number] = work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# %% [markdown]
# Are they really at work at the same time? `mark` leaves a mark on the time line of the device whose thread leaves it.
# If the threads ran one after the other, you would read `0 begins, 0 ends, 1 begins, 1 ends` and so on.


# %%
def overlapping(devices):
    models = [new_model(device) for device in devices]
    inputs, _ = batch_of(0, devices[0])
    pieces = scatter(inputs, devices)

    def work(number):
        mark("begins")
        models[number](pieces[number])
        mark("ends")

    in_threads(work, devices)


run = launch_devices(overlapping, WORLD_SIZE, device=DEVICE)
print(", ".join(f"{event.rank} {event.label}" for event in run.events if event.kind == "mark"))

# %% [markdown]
# ## 5. What must be added up
#
# The loss of a batch is the mean over its B samples. Device i has $n_i$ of them and can compute the mean over these,
# $\ell_i$. The whole is
#
# $$\ell = \frac{1}{B}\sum_{\text{samples}} \ell(\text{sample}) = \sum_i \frac{n_i}{B}\,\ell_i ,
# \qquad\text{so}\qquad \nabla\ell = \sum_i \frac{n_i}{B}\,\nabla\ell_i .$$
#
# Each device counts by its **share of the samples**. When all shares are equal, $n_i/B = 1/N$, and this is the plain
# mean. When they are not, the plain mean is wrong, and section 9 shows by how much.
#
# Note where the factor may stand. A gradient is linear: it does not matter whether you weight the loss before its
# `backward()`, or the gradients after it.
#
# ### Exercise 02.DataParallel
#
# *Difficulty: medium. Importance: high, everything that follows improves on it. Give it 30 minutes.*
#
# **Contract.** `DataParallel(module, devices)`; the module lives on `devices[0]`.
#
# - `dp(inputs)` returns `module(inputs)`, on `devices[0]`, computed by all devices: replicate, scatter, one forward per
#   device at the same time, gather. It is for looking at outputs; no gradient needs to come out of it.
# - `dp.forward_backward(inputs, targets, loss_function)` returns the loss over the whole batch, 0-d, on `devices[0]`, and
#   *adds* its gradient to `.grad` of the module's own parameters (as `backward()` does). Forward **and** backward run
#   in one thread per device. `loss_function(outputs, targets)` is a mean over samples.
# - Inputs and targets live on `devices[0]`; B need not be a multiple of N, and may be smaller than N. A device without
#   samples does nothing.
# - Replicas are made on every call: the module may have changed in any way since the last one.
# - A parameter without a gradient on some devices (None) counts as zeros there.
# - The module's buffers end as what device 0's forward made of them; what the other replicas did to theirs is lost.
# - An exception in a thread reaches the caller.
# - Device 0 sends the parameters and a part of the batch once to each other device, and gets gradients and a loss back.
#   Call what you move back `"gradients"`, or give it no name: the tables of section 6 look for this one.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Write `dp(inputs)` first: it is four lines with `scatter`, `replicate`, `in_threads`, `gather`. Device 0 needs no
# replica: the module itself can work there. Its buffers are then the module's own, and nothing is to be copied back.
# </details>
#
# <details><summary>Hint 2: devices without samples</summary>
#
# The mean over no samples is nan. Leave these devices out: count the pieces that are not empty (they come first when
# you use `tensor_split`), and use only so many devices.
# </details>
#
# <details><summary>Hint 3: forward_backward</summary>
#
# The work of one thread: forward, loss, times `len(piece) / len(inputs)`, backward. Return `loss.detach()`: without the
# graph behind it. Since replica 0 is the module, its gradient is in place already, and added to what was there. The
# gradients of the others are to be moved to `devices[0]` and added.
# </details>
#
# <details><summary>Hint 4: almost the answer</summary>
#
# ```python
# for replica in replicas[1:]:
#     for mine, theirs in zip(self.module.parameters(), replica.parameters()):
#         if theirs.grad is not None:
#             gradient = move(theirs.grad, self.devices[0], "gradients")
#             if mine.grad is None:
#                 mine.grad = ...
#             else:
#                 mine.grad += ...  # in place: no second tensor of that size
# ```
# and in the end the sum of the weighted losses, each moved to `devices[0]`.
# </details>


# %% nbgrader={"grade": false, "grade_id": "DataParallel", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class DataParallel:
    """One model on several devices, from one process."""

    def __init__(self, module, devices):
        self.module, self.devices = module, devices

    def __call__(self, inputs):
        """module(inputs), computed by all devices; the result lives on devices[0]."""
        ### BEGIN SOLUTION
        pieces = [piece for piece in scatter(inputs, self.devices) if len(piece)]
        devices = self.devices[: len(pieces)]
        replicas = [self.module, *(replicate(self.module, device) for device in devices[1:])]
        return gather(in_threads(lambda i: replicas[i](pieces[i]), devices), devices[0])
        ### END SOLUTION

    def forward_backward(self, inputs, targets, loss_function):
        """The loss over the whole batch, 0-d; its gradient is added to `.grad` of the module's parameters."""
        ### BEGIN SOLUTION
        xs = [piece for piece in scatter(inputs, self.devices) if len(piece)]
        ys = scatter(targets, self.devices)
        devices = self.devices[: len(xs)]
        # The module itself works on device 0, so that its gradients and its buffers are kept.
        replicas = [self.module, *(replicate(self.module, device) for device in devices[1:])]

        def work(i):
            loss = loss_function(replicas[i](xs[i]), ys[i]) * (len(xs[i]) / len(inputs))
            loss.backward()
            return loss.detach()

        losses = in_threads(work, devices)
        for replica in replicas[1:]:
            for mine, theirs in zip(
                self.module.parameters(), replica.parameters(), strict=True
            ):
                if theirs.grad is not None:
                    gradient = move(theirs.grad, devices[0], "gradients")
                    if mine.grad is None:
                        mine.grad = gradient
                    else:
                        mine.grad += gradient
        return sum(move(loss, devices[0], "losses") for loss in losses)
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-DataParallel", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
check("02.DataParallel", DataParallel)

# %% [markdown]
# ## 6. Who sends what
#
# Now one training step of the small GPT, and your two predictions from section 2.


# %%
def train(devices, steps, passages=PASSAGES):
    """Steps with your DataParallel and AdamW, as a user would write them. Returns the losses."""
    model = new_model(devices[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dp = DataParallel(model, devices)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step, devices[0], passages)
        optimizer.zero_grad()
        losses.append(dp.forward_backward(inputs, targets, loss_function).item())
        mark(f"gradients of step {step}")
        optimizer.step()
        del inputs, targets
        mark(f"after step {step}")
    return losses


def received(one, what):
    """Bytes of one kind that a device received."""
    return int(one.by_what[what].received) if what in one.by_what else 0


def sent(one, what):
    """Bytes of one kind that a device sent."""
    return int(one.by_what[what].sent) if what in one.by_what else 0


one_step = launch_devices(train, WORLD_SIZE, args=(1,), device=DEVICE)
gradients_in.compare(received(one_step.traffic[0], "gradients"))

# %%
parameters_in.compare(received(one_step.traffic[1], "parameters"))

# %% [markdown]
# Every other device needs the parameters and has gradients: 4 psi bytes in, 4 psi bytes out. Device 0 is at the other
# end of all of it. In elements:
#
# | DataParallel | receives | sends |
# |---|---|---|
# | device 0 | (N-1) psi gradients | (N-1) psi parameters |
# | any other device | psi parameters | psi gradients |
#
# `theory.step_volume` has the same table. Here it stands beside your own run:

# %%
# NBVAL_CHECK_OUTPUT


def states_moved(one):
    """Bytes of parameters and gradients: received, and sent."""
    states = ("parameters", "gradients")
    return sum(received(one, what) for what in states), sum(sent(one, what) for what in states)


rows = []
for one in one_step.traffic:
    volume = theory.step_volume("dp", PSI, WORLD_SIZE, one.rank)
    predicted, measured = (4 * volume.received, 4 * volume.sent), states_moved(one)
    rows.append(
        {
            "device": one.rank,
            "in, predicted": predicted[0],
            "in, measured": measured[0],
            "out, predicted": predicted[1],
            "out, measured": measured[1],
            "all equal": "yes" if predicted == measured else "NO",
        }
    )
table(rows, title="parameters and gradients, bytes per step")

# %% [markdown]
# And the rest? A sample of this text is 32 characters, stored as 8-byte integers, as input and as target: 512 bytes. Each
# other device gets B/N of them. A loss of 4 bytes comes back. That is little here, because tokens are small.

# %%
# NBVAL_CHECK_OUTPUT
sizes = theory.chunk_sizes(PASSAGES, WORLD_SIZE)
table(
    [
        {
            "device": one.rank,
            "in, predicted": 512 * sizes[one.rank] if one.rank else 4 * (WORLD_SIZE - 1),
            "in, measured": int(one.received) - states_moved(one)[0],
        }
        for one in one_step.traffic
    ],
    equal=("in, predicted", "in, measured"),
    title="samples and losses, bytes per step",
)

# %% tags=["picture"]
device_traffic(one_step, f"One step of DataParallel on {WORLD_SIZE} devices, psi = {PSI:,}")

# %% [markdown]
# Each row of the same record as a map: all traffic is in row 0 (what device 0 sends) and column 0 (what it receives).

# %%
show(one_step)

# %% [markdown]
# ### More devices, more load on device 0
#
# **Predict.** Going from 2 devices to 8, by what factor do the bytes grow that device 0 sends? (The batch stays the
# same; its share is small.)

# %%
growth = predict("bytes that device 0 sends with N = 8, divided by the same with N = 2")

# %%
NUMBERS = (2, 3, 4, 6, 8)
of_numbers = {N: launch_devices(train, N, args=(1,), device="cpu") for N in NUMBERS}
growth.compare(of_numbers[8].traffic[0].sent / of_numbers[2].traffic[0].sent)

# %%
charts.bytes_per_rank(
    [(N, [one.sent for one in of_numbers[N].traffic], None) for N in NUMBERS],
    title="bytes that a device sends in one step",
    noun="device",
)

# %% [markdown]
# The more devices help, the more device 0 has to do, while the others do the same as ever. All bytes of a step go
# through one device's links, one transfer after the other: the time for it grows with N - 1. What each device has to
# compute shrinks with 1/N. So there is a number of devices beyond which a step takes *longer*. A ring (lab 04) sends
# 2 (N-1)/N psi per device, less than 2 psi, for any N.
#
# ## 7. Who holds what
#
# **Predict.** Weights, gradients and AdamW's two moments are 16 bytes per parameter in float32. How many bytes of
# model states does device 1 hold between two steps, when the optimizer has stepped?

# %%
at_rest = predict("bytes of model states on device 1 between two steps", unit="bytes", psi=PSI)

# %%
two_steps = launch_devices(train, WORLD_SIZE, args=(2,), device=DEVICE)
(before_step,) = [
    event.time for event in two_steps.events if event.label == "gradients of step 1"
]
(after_step,) = [event.time for event in two_steps.events if event.label == "after step 1"]
rest = [memory.at(after_step) for memory in two_steps.memory]
at_rest.compare(rest[1].live)

# %% [markdown]
# Replicas are thrown away after every step, with their gradients. But while a step runs they are there. Here is what
# the formula says, 16 psi bytes on device 0 and 8 psi on the others *while a step runs*, beside what was measured:
# device 0 just before the optimizer steps, when all gradients have arrived; the others when they held most.

# %%
# NBVAL_CHECK_OUTPUT
rows = []
for memory, sample in zip(two_steps.memory, rest, strict=True):
    states = theory.rank_model_states("dp", PSI, WORLD_SIZE, memory.rank, theory.FP32_ADAM)
    moments = memory.samples if memory.rank else [memory.at(before_step)]
    held = max(one.parameters + one.gradients + one.optimizer for one in moments)
    rows.append(
        {
            "device": memory.rank,
            "states, formula": states.total,
            "states, measured": held,
            "between steps": sample.live,
            "optimizer": sample.optimizer,
        }
    )
table(rows, equal=("states, formula", "states, measured"), title="bytes of model states")

# %% [markdown]
# If a row says NO, your DataParallel holds more than it needs: on device 0 replicas or gradients that outlive
# `forward_backward`, on another device a second copy of something.
#
# Optimizer state is on device 0 only, and never leaves it: device 0 is the only one that steps. It is 8 psi bytes, to
# the byte. Lab 01 counted 4 bytes more per tensor, for Adam's step counters: torch keeps these on the host, and here
# only the devices' memory counts.
#
# A picture of the moment at which each device holds most. "Other" is what the batch costs: samples, activations, and
# gradients that have just arrived. This is where it shows on device 0 if gradients are not added in place (`+` makes a
# new tensor before the old one goes), or if it works on a replica of its own.

# %%
peaks = [max(memory.samples, key=lambda sample: sample.live) for memory in two_steps.memory]
state_bars(
    {
        f"device {number}": {
            "weights": peak.parameters,
            "gradients": peak.gradients,
            "optimizer": peak.optimizer,
            "other": peak.other,
        }
        for number, peak in enumerate(peaks)
    },
    title="live bytes at each device's peak",
)

# %% [markdown]
# So device 0 needs the most memory too. The difference is the optimizer state: with AdamW in float32, as here, 8 bytes
# per parameter, for a model of a billion parameters 8 GB. With the mixed-precision engine of section 12 it is 12 bytes:
# the float32 master weights count too. If all GPUs are the same, the memory of the others lies idle. (The converse
# complaint, that every GPU holds the same optimizer state, is what ZeRO is about. DataParallel has the state once.)
#
# ## 8. Is it the same training?
#
# Your DataParallel against one device that takes the whole batch, same weights, same samples: the loss, and the gradient
# of all parameters. Nothing is exactly equal in floating point when sums are taken in another order. Relative to the
# largest number in the gradient, float32 has an accuracy of about $10^{-7}$. A mistake looks different: a gradient that
# is divided by N once too often is off by 1 - 1/N, and one that is a sum where it should be a mean by N - 1.


# %%
def gradient_of(devices, rows, parallel):
    """Loss and gradient, as one flat tensor, of a batch with that many passages."""
    model = new_model(devices[0])
    inputs, targets = batch_of(0, devices[0], rows)
    if parallel:
        loss = DataParallel(model, devices).forward_backward(inputs, targets, loss_function)
    else:
        loss = loss_function(model(inputs), targets)
        loss.backward()
    return loss.item(), torch.cat([one.grad.flatten() for one in model.parameters()])


def compare(devices, rows):
    """Relative differences between N devices and one, of the loss and of the gradient."""
    loss, gradient = gradient_of(devices, rows, parallel=True)
    whole_loss, whole = gradient_of(devices, rows, parallel=False)
    return abs(loss - whole_loss) / whole_loss, (
        (gradient - whole).abs().max() / whole.abs().max()
    ).item()


rows = []
for passages in (24, 13, 2):
    (differences,) = launch_devices(
        compare, WORLD_SIZE, args=(passages,), device=DEVICE
    ).results
    shares = [size for size in theory.chunk_sizes(passages, WORLD_SIZE) if size]
    rows.append(
        {
            "passages": passages,
            "shares": ", ".join(map(str, shares)),
            "loss differs by": f"{differences[0]:.0e}" if differences[0] else "0",
            "gradient differs by": f"{differences[1]:.0e}" if differences[1] else "0",
            "within rounding": "yes" if max(differences) < 1e-5 else "NO",
        }
    )
table(rows, title=f"{WORLD_SIZE} devices against one, float32")

# %% [markdown]
# ## 9. Break it on purpose: the plain mean
#
# The most natural mistake: every device computes the mean loss of its part, and the results are averaged over the
# devices. With 13 passages on 4 devices the shares are 4, 3, 3, 3. How much does one passage count then?

# %%
# NBVAL_CHECK_OUTPUT
shares = theory.chunk_sizes(13, 4)
table(
    [
        {
            "device": number,
            "passages": share,
            "each should count": "1/13",
            "each counts": f"1/4 x 1/{share} = 1/{4 * share}",
            "that is, times": 13 / (4 * share),
        }
        for number, share in enumerate(shares)
    ],
    title="the plain mean of four means",
)

# %% [markdown]
# The passages on device 0 count too little, all others too much. Is that a mistake that one would notice? Measure it: the
# gradient of the plain mean, against the true one. No device is needed for this, only arithmetic.


# %%
def plain_mean_error(rows, count):
    """How far the plain mean over `count` shares is from the whole batch's: of losses, and of gradients. Relative."""
    model = new_model("cpu")
    inputs, targets = batch_of(0, "cpu", rows)

    def gradient(losses):
        model.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.item(), torch.cat([one.grad.flatten() for one in model.parameters()])

    whole_loss, whole = gradient([loss_function(model(inputs), targets)])
    pairs = [
        pair
        for pair in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        if len(pair[0])
    ]
    loss, plain = gradient([loss_function(model(x), y) for x, y in pairs])
    return abs(loss - whole_loss) / whole_loss, ((plain - whole).norm() / whole.norm()).item()


errors = {rows: plain_mean_error(rows, 4) for rows in (12, 13, 9, 5)}
table(
    [
        {
            "passages": rows,
            "shares": ", ".join(map(str, theory.chunk_sizes(rows, 4))),
            "loss is off by": f"{100 * of_loss:.1g} %" if of_loss else "0 %",
            "gradient is off by": f"{100 * of_gradient:.2g} %",
        }
        for rows, (of_loss, of_gradient) in errors.items()
    ],
    title="the plain mean on 4 devices",
)

# %% [markdown]
# With equal shares the difference is rounding. With unequal ones the gradient is off by some percent, and the loss by
# much less: no crash, and no number that looks wrong. It happens in the last batch of an epoch when N does not divide
# it, and whenever devices have different numbers of tokens to predict. A test with 12 passages and 4 devices never
# finds it.
#
# ## 10. What is not the same: BatchNorm
#
# The equality rests on one thing: the loss is a mean over samples, and a sample's loss depends on that sample alone.
# BatchNorm breaks this. In training it normalises with the mean and variance *of the batch*, and each device has only
# its part. It also keeps running means for later use, in buffers.


# %%
def with_batch_norm(devices):
    """The running mean after one step on all devices, on the whole batch alone, and on device 0's part alone."""
    torch.manual_seed(SEED)
    plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(devices[0])
    inputs = torch.randn(24, 8).to(devices[0])
    targets = inputs.sum(1, keepdim=True)
    seen = {}
    for name in ("all devices", "one device", "device 0's part"):
        model = copy.deepcopy(plain)
        part = len(scatter(inputs, devices)[0]) if name == "device 0's part" else len(inputs)
        x, y = inputs[:part], targets[:part]
        if name == "all devices":
            DataParallel(model, devices).forward_backward(x, y, functional.mse_loss)
        else:
            functional.mse_loss(model(x), y).backward()
        seen[name] = model[0].weight.grad.norm().item(), model[1].running_mean.tolist()
    return seen


(seen,) = launch_devices(with_batch_norm, WORLD_SIZE, device=DEVICE).results
table(
    [
        {
            "batch": name,
            "norm of the gradient": norm,
            "running mean": ", ".join(f"{value:+.4f}" for value in mean),
        }
        for name, (norm, mean) in seen.items()
    ]
)

# %% [markdown]
# The gradient is another one than on a single device with the whole batch: each device normalised with B/N samples. And
# the running mean is the one of device 0's part, to the digit: the buffers of the other replicas were thrown away with
# the replicas. Whether that hurts depends on B/N. Wu and He measured it for a ResNet-50 on ImageNet: the fewer samples
# per device, the larger the error, and it grows fast at the end, towards 2. LayerNorm, which transformers use,
# normalises within a sample and has no such problem.
#
# ## 11. Threads and the GIL
#
# In section 4 all threads were at work at the same time. But how much work gets done? A Python process has a lock, the
# **global interpreter lock** (GIL): only the thread that holds it can execute Python. A thread gives it up now and then, and
# torch gives it up while it computes. So threads speed up what happens *inside* torch's operations, and not the Python
# around them. A process has a GIL of its own.
#
# **Predict.** N threads each count down from the same number, in pure Python. How many times as long does that take as one
# thread alone?

# %%
slower = predict("time of N threads counting, divided by the time of one", N=WORLD_SIZE)


# %%
def counting(amount):
    """Nothing but Python."""
    while amount:
        amount -= 1


def small_operations(amount):
    """Many operations on 8 numbers: as much Python as computing."""
    numbers = torch.ones(8)
    for _ in range(amount):
        numbers = numbers * 0.5


def large_operations(amount):
    """Few operations on many numbers: nearly all of it inside torch."""
    matrix = torch.full((500, 500), 0.001)
    for _ in range(amount):
        matrix = matrix @ matrix


def training(amount):
    """Forward and backward of the GPT on the part of the batch that one device has."""
    model = new_model("cpu")
    inputs, targets = batch_of(0, "cpu", PASSAGES // WORLD_SIZE)
    for _ in range(amount):
        loss_function(model(inputs), targets).backward()


def in_threads_of_one_process(work, amount, count):
    """`count` threads, each with this much work."""
    threads = [threading.Thread(target=work, args=(amount,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timings(work, amount, rounds=3):
    """On N ranks: seconds that one worker alone computes, that N threads of rank 0 take, and that N processes take; and
    the share of a core that the worker alone got. Best of several rounds; in each the three come one after the other.
    """
    torch.set_num_threads(1)
    rank, best, share = dist.get_rank(), [float("inf")] * 3, 0.0
    for _ in range(rounds):
        for way in range(3):
            dist.barrier()
            began, computed = time.perf_counter(), time.thread_time()
            if way == 1 and rank == 0:
                in_threads_of_one_process(work, amount, dist.get_world_size())
            elif way == 2 or rank == 0:
                work(amount)
            seconds, computed = time.perf_counter() - began, time.thread_time() - computed
            if way == 0 and rank == 0:
                share = max(share, computed / seconds)
                seconds = computed  # without the time in which it waited for a core
            if way == 2:
                dist.barrier()  # the slowest counts
                seconds = time.perf_counter() - began
            best[way] = min(best[way], seconds)
    return *best, share


def all_timings(works):
    return {work.__name__: timings(work, amount) for work, amount in works}


WORK = [
    (counting, 4_000_000),
    (small_operations, 20_000),
    (training, 12),
    (large_operations, 20),
]
measured = launch(all_timings, WORLD_SIZE, args=(WORK,), device="cpu", meter=False).results[0]
slower.compare(measured["counting"][1] / measured["counting"][0])

# %%
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
at_best = max(1.0, WORLD_SIZE / cores)
print(f"{WORLD_SIZE} workers, {cores} cores: at best {at_best:.3g} times as long as one worker")
busy = min(share for *_, share in measured.values())
print(f"one worker alone got at least {100 * busy:.0f} % of a core")
if busy < 0.9:
    print("the machine is busy with other things: the ratios below are too high")
table(
    [
        {
            "work": name.replace("_", " "),
            "one worker computes (s)": alone,
            "N threads, times that": threads / alone,
            "N processes, times that": processes / alone,
        }
        for name, (alone, threads, processes, _) in measured.items()
    ]
)

# %% [markdown]
# Read it like this. N workers do N times the work. With a core for each they could be done in the time of one. With
# fewer cores the best is N workers, divided by the number of cores: the line above says what that is here. (Where two
# "cores" are the two halves of one, as on many machines, even that is out of reach.) For one worker alone the time is
# counted in which it had a core. For N workers it is the time on the clock, so that other programs can only raise the
# ratios.
#
# - **Counting:** the GIL lets one thread count at a time, so N threads need N times as long as one alone, and some time
#   for handing the lock over: about N or more, on any number of cores. N processes each have a GIL of their own, and
#   only the number of cores limits them.
# - **Small operations:** the threads give up the GIL for each operation and must get it back after each. That may gain a
#   little, or lose.
# - **Training:** what each of your threads does in a step. Much of it is Python as well: this GPT's operations are
#   small.
# - **Large operations:** nearly all the time is spent inside torch, without the GIL. So the GIL is no reason for threads
#   to be slower here. Memory and caches, which all workers share, may be one, for threads and processes alike.
#
# The counting line shows what the GIL must cost. How much it costs in the other lines depends on the machine and on
# what else runs there: one process with N threads does not get the same share of a busy machine as N processes.
#
# Training on GPUs is more like the second line than one would think: Python only *launches* the work, thousands of small
# calls per step, and a fast GPU can be done before Python has launched the next.
# With 8 GPUs in one process, one GIL must launch for all 8. This is why lab 03 starts N processes.
#
# ## 12. The second row of the ledger
#
# The same GPT and the same batch as in lab 01, with fp16 weights and gradients and your MixedPrecisionAdam (or the
# course's: `reuse("01_model_states", own=True)` takes yours). The engine multiplies the loss by its scale before
# `backward`; here `forward_backward` calls backward, so the scale goes into the loss function.

# %%
MixedPrecisionAdam = reuse("01_model_states").MixedPrecisionAdam


def train_in_fp16(devices, steps=2):
    model = new_model(devices[0], torch.float16)
    engine = MixedPrecisionAdam(model.parameters())
    dp = DataParallel(model, devices)

    def scaled_loss(outputs, targets):
        return loss_function(outputs, targets) * engine.scale

    for step in range(steps):
        inputs, targets = batch_of(step, devices[0])
        engine.zero_grad()
        dp.forward_backward(inputs, targets, scaled_loss)
        engine.step()
        del inputs, targets
        mark("after a step")


STEPS = 2
run = launch_devices(train_in_fp16, WORLD_SIZE, args=(STEPS,), device=DEVICE)
end = [event.time for event in run.events if event.label == "after a step"][-1]
busiest = max(run.traffic, key=lambda one: one.sent)
record(
    LedgerRow(
        lab="02",
        strategy="DataParallel",
        world_size=WORLD_SIZE,
        held=max(memory.at(end).live for memory in run.memory),
        held_formula=theory.rank_model_states("dp", PSI, WORLD_SIZE, 0).total,
        sent=busiest.sent / STEPS,
        sent_formula=2 * theory.step_volume("dp", PSI, WORLD_SIZE).sent,
        messages=busiest.messages_sent // STEPS,
        limited_by="device 0, and the GIL",
    )
)

# %% [markdown]
# The worst-off device is 0. What it sent beyond the formula is the other devices' part of the batch. Its messages are one
# per parameter and other device, and two for the samples.
#
# ## 13. What production systems do differently
#
# **`torch.nn.DataParallel`** is what you have built, for real GPUs. What its documentation and its code say, beside
# yours:
#
# | | `nn.DataParallel` | yours |
# |---|---|---|
# | replicas | made in each forward, from the module on `device_ids[0]` | the same |
# | batch | cut along its first dimension as `torch.chunk` cuts, which "may return fewer" chunks than asked for | one piece per device |
# | loss | outputs are gathered on device 0; the loss is computed there, by your own code | on every device |
# | gradients | summed into the original module, by autograd, on the way back through the replication | weighted, then added |
# | buffers | replica 0 shares the module's; what the others write is lost | the same |
#
# - The line about the loss has two sides. Since the loss is the mean over the whole batch, the sum of the gradients has the right
#   weights by itself: no plain mean can go wrong. But all outputs travel to device 0 and are held there: a number for
#   each token of the vocabulary, at each place of each passage. Here that is 24 x 32 x 66 x 4 = 202,752 bytes. With
#   1,024 places and GPT-2's vocabulary it would be 24 x 1,024 x 50,257 x 4 bytes = 4.9 GB.
# - The second line is the trap of exercise 02.scatter: 9 samples on 4 GPUs become 3 chunks of 3, and one GPU is idle.
#   The largest chunk is no larger than yours, so that the step takes as long.
# - It copies parameters in large buffers instead of one by one, and on GPUs with NCCL it broadcasts them: fewer and better
#   transfers, but still from one source.
# - PyTorch recommends `DistributedDataParallel` instead, "even if there is only a single node". That is lab 03: no GIL
#   to share, no replicas to send, no device 0.
# - Driving several devices from one process is not gone. JAX does it: there the whole step is compiled, and Python
#   launches one thing per step instead of thousands.
#
# ## 14. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** A model has 7.5 billion parameters, with fp16 weights and gradients, on 8 devices with DataParallel. How many
# bytes does device 0 send per step, and how long does that take on a link of 25 GB/s?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-bytes", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# (N-1) psi elements of 2 bytes: 7 x 7.5e9 x 2 = 105 GB, which takes 4.2 seconds. As many bytes of gradients come in, and
# the other devices move 15 GB each way.

# %% [markdown]
# **Q2.** Your DataParallel sends the parameters in every step. Could the replicas be kept, and only be told what has
# changed? What would that save?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-kept", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# After an optimizer step everything has changed: what would have to be told is as large as the parameters. If each
# device applied the step itself, nothing would have to be sent, but then each needs the summed gradients and the
# optimizer state. That is DDP: one all-reduce, instead of gradients to device 0 and parameters back, and 16 psi bytes on
# every device.

# %% [markdown]
# **Q3.** Somebody tests a DataParallel with AdamW, a batch of 24 on 4 devices, and compares the parameters after ten steps
# with one device. Name two mistakes that this test cannot find. (Adam's step is the running mean of the gradient,
# divided by the root of the running mean of its square. What does a factor of 4 in every gradient do to it?)

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-test", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# The plain mean: 24 is a multiple of 4. And a constant factor, such as gradients that are summed and never divided:
# the factor stands above and below the line, and cancels. Compare `.grad`, and use 13 samples.

# %% [markdown]
# ## Sources
#
# - PyTorch documentation, *torch.nn.DataParallel* (docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html):
#   replication in each forward, chunking, gradients summed, buffers of device 0, the recommendation of DDP. Where the
#   loss is computed and how parameters are copied stands in its code: torch/nn/parallel.
# - PyTorch documentation, *torch.chunk*: fewer chunks than asked for.
# - S. Li et al.: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, arXiv 2006.15704:
#   `DataParallel` (one process, many threads) and `DistributedDataParallel` (many processes) beside each other.
# - S. Ioffe, C. Szegedy: *Batch Normalization*, arXiv 1502.03167, section 3: statistics of the mini-batch in training.
# - Y. Wu, K. He: *Group Normalization*, arXiv 1803.08494: the error of BatchNorm against the samples per device.
# - Python documentation, *Glossary*: global interpreter lock; PEP 703, for a Python without it.
# - S. Rajbhandari et al.: *ZeRO*, arXiv 1910.02054, section 3: 16 bytes per parameter.

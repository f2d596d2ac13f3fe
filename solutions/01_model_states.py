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
# # 01 - Model states and mixed precision
#
# **You build:** `model_state_bytes`, which counts what training keeps in memory, and `MixedPrecisionAdam`, an optimizer
# that trains a model of 16-bit numbers. **Time:** 60 to 90 minutes.
#
# **Where this stands.** This course spreads training over many GPUs. But what is there to spread? This notebook stays
# with one process, mostly, and counts. Every parameter of a model costs 16 bytes while it is trained, 12 of them for
# numbers that only the optimizer looks at. You will see where each of them comes from, and build the engine that holds
# them. ZeRO, which you build from lab 06 on, is about these 16 bytes and nothing else.
#
# At the end your own engine trains a small GPT in 16 bits, beside the ordinary optimizer in 32 bits, on the same
# batches. Labs 02 and 03 train with this engine.
#
# **How to work.** Run the cells from top to bottom. Where a cell says `not written yet`, it is your turn. Every
# exercise has a check right below it. Hints fold open one at a time. Before measurements there is a field for a
# prediction: write one down, even a wild one.
#
# **Two letters.** Everywhere in this course N is the number of ranks (processes), and psi is the number of parameters
# of the model.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes) in some cells, at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
STEPS = 30  # training steps of each loss curve

# %% tags=["export"]
import torch
import torch.distributed as dist

# %%
import time

from shardlab import check, device, launch, predict, table, theory
from shardlab.ledger import LedgerRow, record
from shardlab.meters import label, memory_so_far
from shardlab.model import GPT, SMALL, loss_function
from shardlab.text import batch
from shardlab.widgets.curves import curves
from shardlab.widgets.exponents import exponents
from shardlab.widgets.scales import scale_steps
from shardlab.widgets.state_bars import state_bars
from shardlab.widgets.svg import as_svg

GPU = DEVICE != "cpu" and torch.cuda.is_available()
HERE = torch.device("cuda" if GPU else "cpu")  # where this notebook's own process computes
PASSAGES, LENGTH = 24, 32  # a batch: 24 passages of 32 characters

# The model is small: a second thread brings little, and on a busy machine two get in each
# other's way.
torch.set_num_threads(1)


def new_model(dtype=torch.float32, where=HERE):
    """The course's small GPT, with the same first weights each time."""
    torch.manual_seed(SEED)
    return GPT(SMALL).to(where, dtype)


def batch_of(step, passages=PASSAGES, where=HERE):
    """Inputs and targets of one training step."""
    inputs, targets = batch(step, passages, LENGTH, SEED)
    return inputs.to(where), targets.to(where)


PSI = new_model().parameter_count
print(f"psi = {PSI:,} parameters, in {len(list(new_model().parameters()))} tensors")

# %% [markdown]
# ## 1. What training keeps
#
# A training step computes **gradients**, one number for every parameter, and an **optimizer** uses them to change the
# parameters. Plain gradient descent needs nothing else. Adam, which nearly all large models are trained with, keeps two
# more numbers for every parameter: a running mean of its gradient, called the **first moment**, and a running mean of
# the gradient's square, the **second moment**. Together, weights, gradients and what the optimizer keeps are called the
# **model states**. They do not depend on the batch. (What does, the **activations**, comes in section 3.)
#
# **Predict.** The small GPT has float32 weights, 4 bytes each, and is trained by `torch.optim.AdamW`. How many bytes do
# its model states take, between backward and the end of the step? You may type arithmetic.

# %%
fp32_states = predict(
    "bytes of the model states, float32 weights and AdamW", unit="bytes", psi=PSI
)

# %% [markdown]
# To measure it, you need something that counts. Counting has a trap. A tensor is only a *view*: a shape and a place in
# a piece of memory, called its **storage**. Several tensors can share one storage. And a small tensor can be a slice of
# a large storage, which then stays in memory as a whole. So what counts is storages, each of them once. `.nbytes()` is
# the size of one. Its address, `.data_ptr()`, tells it from others:

# %%
# NBVAL_CHECK_OUTPUT
whole = torch.zeros(1000, 100)  # float32
piece = whole[:10]
del whole
print("elements of the piece, in bytes:", piece.numel() * piece.element_size())
print("memory that it keeps alive:     ", piece.untyped_storage().nbytes())

other = piece[5:].view(-1)  # begins elsewhere, has another shape, and is in the same memory
print("one tensor: ", piece is other)
print("one storage:", piece.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())

# %% [markdown]
# This will matter: later on, code that believes it has given memory back often holds on to a slice of it.
#
# ### Exercise 01.model_state_bytes
#
# *Difficulty: easy, with traps. Importance: high, it is the yardstick of this lab. Give it 15 minutes.*
#
# **Contract.** Return `{"weights": ..., "gradients": ..., "optimizer": ...}`, three whole numbers of bytes.
#
# - `"weights"`: the memory of all parameters of the model, trained or not. Buffers, such as the running means of a
#   BatchNorm layer, are no parameters.
# - `"gradients"`: the memory of every parameter's `.grad`, where there is one.
# - `"optimizer"`: the memory of every tensor in `optimizer.state`. This is a dict which maps each parameter to a dict
#   of what the optimizer keeps for it. Some of these values are no tensors, but plain numbers or None: they count
#   nothing.
#
# What counts is memory: within each of the three numbers every storage counts once, with all its bytes, however many
# tensors share it. Change nothing.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Look at what there is: run `optimizer = torch.optim.AdamW(...)`, one backward, one step, and print
# `next(iter(optimizer.state.values()))`. Some of it is small.
# </details>
#
# <details><summary>Hint 2: memory, once</summary>
#
# `tensor.untyped_storage()` is the storage, `.nbytes()` its size and `.data_ptr()` its address. Two tensors share
# memory when their storages have the same address. Keep the addresses that you have counted in a `set`.
# </details>
#
# <details><summary>Hint 3: almost the answer</summary>
#
# Write a helper that takes any number of tensors:
# ```python
# def memory_of(tensors):
#     sizes = {}  # by address
#     for one in tensors:
#         sizes[...] = ...
#     return sum(sizes.values())
# ```
# Then call it for `model.parameters()`, for the gradients that are not None, and for the values in
# `optimizer.state.values()`, of which each is itself a dict. `torch.is_tensor(value)` tells tensors from the rest.
# </details>


# %% nbgrader={"grade": false, "grade_id": "model_state_bytes", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def model_state_bytes(model, optimizer):
    """Bytes held by the model states: {"weights": int, "gradients": int, "optimizer": int}.

    weights: the model's parameters. gradients: their `.grad`. optimizer: the tensors in
    `optimizer.state`, a dict per parameter. In each of the three, memory counts once, however
    many tensors share it.
    """
    ### BEGIN SOLUTION

    def nbytes(tensors):
        storages = (tensor.untyped_storage() for tensor in tensors)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(sizes.values())

    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": nbytes(parameters),
        "gradients": nbytes(gradients),
        "optimizer": nbytes(value for value in values if torch.is_tensor(value)),
    }
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "check-model_state_bytes", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("01.model_state_bytes", model_state_bytes)

# %% [markdown]
# ### Measured, moment by moment
#
# Now count during one step of ordinary training. `launch` runs the function in a process of its own, where the
# course's memory meter notes every storage that is made and freed, whoever makes it. `memory_so_far()` asks it.


# %%
KINDS = {  # what torch.optim.AdamW calls them, and what you will call them
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "master": "master weights",
    "first_moment": "first moment",
    "second_moment": "second moment",
}


def by_kind(optimizer):
    """Bytes of the optimizer's large tensors by kind, as far as their names are known."""
    kinds = {}
    for state in optimizer.state.values():
        for name, kind in KINDS.items():
            if name in state:
                kinds[kind] = kinds.get(kind, 0) + state[name].untyped_storage().nbytes()
    return kinds


def one_step_in_fp32():
    """Model states at four moments of a step; at the third also as the meter sees them."""
    model = new_model(where=device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moments = {"before backward": model_state_bytes(model, optimizer)}
    inputs, targets = batch_of(0, where=device())
    loss_function(model(inputs), targets).backward()
    moments["after backward"] = model_state_bytes(model, optimizer)
    optimizer.step()
    moments["after the first step"] = model_state_bytes(model, optimizer)
    metered = memory_so_far().at_end
    optimizer.zero_grad()
    moments["after zero_grad"] = model_state_bytes(model, optimizer)
    return moments, metered, by_kind(optimizer)


moments, fp32_metered, fp32_kinds = launch(one_step_in_fp32, 1, device=DEVICE).results[0]

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {"moment": moment, **counted, "sum": sum(counted.values())}
        for moment, counted in moments.items()
    ]
)

# %% [markdown]
# The gradients appear in backward and are gone after `zero_grad`. The moments appear in the *first step*: a program
# that fits into memory when it starts may run out of it one step later. Beside the formulas, after the first step:

# %%
# NBVAL_CHECK_OUTPUT
fp32_counted = moments["after the first step"]
TENSORS = len(list(new_model().parameters()))
table(
    [
        {
            "state": "weights",
            "formula": "4 psi",
            "predicted": theory.FP32_ADAM.weight * PSI,
            "measured": fp32_counted["weights"],
            "memory meter": fp32_metered.parameters,
        },
        {
            "state": "gradients",
            "formula": "4 psi",
            "predicted": theory.FP32_ADAM.gradient * PSI,
            "measured": fp32_counted["gradients"],
            "memory meter": fp32_metered.gradients,
        },
        {
            "state": "optimizer",
            "formula": "(4 + 4) psi + 4 per tensor",
            "predicted": theory.FP32_ADAM.optimizer * PSI + 4 * TENSORS,
            "measured": fp32_counted["optimizer"],
            "memory meter": fp32_metered.optimizer,
        },
    ],
    equal=("predicted", "measured"),
)

# %%
fp32_states.compare(sum(fp32_counted.values()))

# %% [markdown]
# So float32 training with Adam holds 4 + 4 + 4 + 4 = **16 bytes per parameter**. (The 4 bytes per tensor are a step
# count, which PyTorch keeps as a small float32 tensor beside the two moments.) A model of 7.5 billion parameters needs
# 120 GB, before the first activation. A GPU with 80 GB cannot train it.
#
# An obvious idea: take 16-bit numbers, 2 bytes each, for everything. That would be 8 bytes per parameter. The next
# section shows why it fails, and what has to stay in 32 bits. Remember the 16 while you read: the number will surprise
# you at the end.
#
# ## 2. What a 16-bit number can hold
#
# A floating-point number is a sign, an exponent and a fraction: $\pm 1.f \times 2^{e}$. There are two common ways to
# spend 16 bits:
#
# | | sign | exponent | fraction | |
# |---|---|---|---|---|
# | float32, fp32 | 1 | 8 | 23 | |
# | float16, fp16 | 1 | 5 | 10 | more digits, less range |
# | bfloat16, bf16 | 1 | 8 | 7 | the range of fp32, few digits |
#
# From these, everything follows. With f bits of fraction:
#
# - the numbers between 1 and 2 are $2^{-f}$ apart. That is the **spacing** at 1; between 2 and 4 it is twice as much,
#   between 1/2 and 1 it is half of it;
# - with k bits, exponents of ordinary (**normal**) numbers run from $-(2^{k-1}-2)$ to $2^{k-1}-1$: for fp16 from -14 to
#   15. The largest number is $(2-2^{-f})\cdot 2^{15} = 65504$. Beyond it comes inf;
# - below the smallest normal number, $2^{-14}$, come the **subnormal** ones. They keep the spacing of the smallest
#   normal numbers, $2^{-14-f} = 2^{-24}$, so they have fewer and fewer digits left. Half of the last one and less is
#   rounded to 0.

# %%
# NBVAL_CHECK_OUTPUT


def measured_limits(dtype):
    """Largest finite number, spacing at 1, smallest normal and subnormal, by looking."""
    one = torch.tensor(1.0, dtype=dtype)
    infinity, zero = torch.tensor(float("inf"), dtype=dtype), torch.tensor(0.0, dtype=dtype)
    spacing = torch.nextafter(one, infinity) - one  # the next number after 1
    subnormal = torch.nextafter(zero, one)  # the next number after 0
    normal, odd = one, one + spacing  # odd has all its digits in use
    while odd / 2 * 2 == odd:  # halving has lost no digit
        normal, odd = normal / 2, odd / 2
    return torch.nextafter(infinity, zero), spacing, normal, subnormal


rows = []
for name, exponent, fraction in (("float32", 8, 23), ("float16", 5, 10), ("bfloat16", 8, 7)):
    highest = 2 ** (exponent - 1) - 1
    lowest = 1 - highest
    by_formula = {
        "largest": (2 - 2**-fraction) * 2.0**highest,
        "spacing at 1": 2.0**-fraction,
        "smallest normal": 2.0**lowest,
        "smallest subnormal": 2.0 ** (lowest - fraction),
    }
    found = [number.double().item() for number in measured_limits(getattr(torch, name))]
    for (limit, formula), number in zip(by_formula.items(), found, strict=True):
        rows.append({"type": name, "limit": limit, "formula": formula, "found": number})
table(rows, equal=("formula", "found"))

# %% [markdown]
# ### Small updates vanish
#
# In training, a weight changes by a little in every step. **Predict.** A weight is 1. A thousand times, 0.0001 is added
# to it. In exact arithmetic it ends at 1.1. Where does it end in fp16?

# %%
thousand_updates = predict("1 + 0.0001, a thousand times, in float16")


# %%
# NBVAL_CHECK_OUTPUT
def add_up(dtype, update=1e-4, times=1000):
    weight = torch.ones(1, dtype=dtype)
    for _ in range(times):
        weight += update
    return weight.item()


added = {name: add_up(getattr(torch, name)) for name in ("float32", "float16", "bfloat16")}
table(
    [
        {
            "type": name,
            "spacing at 1": torch.finfo(getattr(torch, name)).eps,
            "after 1000 updates": weight,
        }
        for name, weight in added.items()
    ]
)

# %%
thousand_updates.compare(added["float16"])

# %% [markdown]
# Nothing at all. The next fp16 number after 1 is $1 + 2^{-10} \approx 1.00098$. The sum 1.0001 lies nearer to 1, and is
# rounded back to 1, a thousand times. An update counts only when it is larger than half of the spacing, and the spacing
# grows with the weight. A weight of size w moves only for updates above w/4096 to w/2048 in fp16, and w/512 to w/256 in
# bf16, depending on where it lies between two powers of two.
#
# The cure: keep the weights in fp32, let the updates add up *there*, and hand a rounded 16-bit copy to the model. The
# fp32 weights are called **master weights** (Micikevicius et al. 2018, section 3.1). The moments stay in fp32 for the
# same reason: a running mean takes in one part in ten, or in a thousand, at a time.

# %%
# NBVAL_CHECK_OUTPUT
master = torch.ones(1)  # float32
for _ in range(1000):
    master += 1e-4
    weight = master.half()  # what the model computes with; made anew each time, never read back
print(f"master {master.item():.6f}, its float16 copy {weight.item():.6f}")

# %% [markdown]
# ## 3. Why bother
#
# So far, 16 bits have cost something: weights 2, gradients 2, and now 4 for the master weights and 4 + 4 for the
# moments. The sum is 2 + 2 + 12 = **16 bytes per parameter, as before**. Mixed precision does not save a byte of model
# states. What it buys is something else.
#
# **Activations.** Backward needs what forward computed, so it is kept until then. How much that is depends on the
# batch. PyTorch tells which tensors it keeps:


# %%
def activation_bytes(dtype):
    """Bytes that forward keeps for backward, parameters not counted."""
    model = new_model(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, targets = batch_of(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_function(model(inputs), targets)
    del loss  # alive until here, so that no address was used twice
    return sum(kept.values())


activations = {name: activation_bytes(getattr(torch, name)) for name in ("float32", "float16")}
table(
    [
        {
            "type": name,
            "activations": kept,
            "per parameter": kept / PSI,
            "model states": 16 * PSI,
        }
        for name, kept in activations.items()
    ],
    title=f"bytes, for a batch of {PASSAGES} passages of {LENGTH} characters",
)

# %% [markdown]
# Even for this small batch they outweigh the model states. In 16 bits they are little more than half as large. (Not
# exactly half: the loss is computed in fp32, and keeps fp32 numbers.)
#
# **Speed.** GPUs have circuits for multiplying matrices of 16-bit numbers, called tensor cores. NVIDIA's data sheet of
# the A100 states 312 TFLOPS for fp16 and bf16, and 19.5 for fp32 without tensor cores. CPUs are another matter:


# %%
def gflops(dtype, size=384, repeats=3):
    """Billions of operations per second in a product of two square matrices: the best."""
    left = torch.randn(size, size, device=HERE).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        left @ left
        if GPU:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


table(
    [
        {"type": name, "GFLOPS, measured here": gflops(getattr(torch, name))}
        for name in ("float32", "float16", "bfloat16")
    ],
    title=f"multiplying matrices on this {HERE.type}",
)

# %% [markdown]
# Where a CPU has no circuits for fp16, it is slower than fp32, and this notebook's fp16 steps take their time. The
# numbers are the same as a GPU's up to rounding.
#
# **Traffic.** In data-parallel training, gradients travel between the GPUs in every step. In 16 bits they are half as
# many bytes. The rest of this course counts them.
#
# ## 4. Gradients and the range of fp16
#
# Weights are of moderate size, gradients are small. Are they too small for fp16? Let us look at real ones. First, some
# ordinary fp32 training, because a model that has learnt something has other gradients than a fresh one.


# %%
def train(model, optimizer, steps=STEPS):
    """Ordinary training. Returns the losses."""
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


trained = new_model()
train(trained, torch.optim.AdamW(trained.parameters(), lr=3e-3), steps=100)


def gradients_of(model):
    """Gradients after one backward in fp32: of the logits, and of all weights."""
    inputs, targets = batch_of(1000)
    logits = model(inputs)
    logits.retain_grad()
    model.zero_grad()
    loss_function(logits, targets).backward()
    weights = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return {"logits": logits.grad.flatten().cpu(), "weights": weights.cpu()}


true_gradients = gradients_of(trained)

# %% [markdown]
# Backward begins at the end of the model, with the gradients of the logits: one for each of the 66 possible characters
# at each of the 24 x 32 places. The loss is a *mean* over 768 places, so each of them is a difference of probabilities
# divided by 768. Everything else is computed from these.
#
# **Predict.** Which percentage of the logits' gradients falls below $2^{-14}$, where fp16 begins to lose digits?

# %%
small_share = predict("logits' gradients below 2**-14", unit="%")


# %%
def in_fp16(gradients, scale):
    """What fp16 makes of gradients times a scale, in percent of those that are not 0."""
    gradients = gradients[gradients != 0]
    halves = (gradients * scale).half()
    return {
        "become 0": 100 * (halves == 0).double().mean().item(),
        "lose digits": 100 * ((halves != 0) & (halves.abs() < 2.0**-14)).double().mean().item(),
        "become inf": 100 * halves.isinf().double().mean().item(),
    }


SCALES = (1, 2.0**8, 2.0**16, 2.0**24)
table(
    [
        {"gradients of": name, "scale": scale, **in_fp16(gradients, scale)}
        for name, gradients in true_gradients.items()
        for scale in SCALES
    ],
    title="percent of the gradients, in fp16",
)

# %%
unscaled = in_fp16(true_gradients["logits"], 1)
small_share.compare(unscaled["become 0"] + unscaled["lose digits"])

# %%
exponents(
    {
        "logits' gradients": true_gradients["logits"].tolist(),
        "times 2^16": (true_gradients["logits"] * 2.0**16).tolist(),
    }
)

# %% [markdown]
# Without scaling, nearly all logits' gradients lie where fp16 has few digits left, and some become 0. This is a small
# model with a small batch. A larger batch divides the same probabilities by more places. And a network with real
# trouble is in figure 3 of Micikevicius et al.: so many of its gradients became 0 that it did not train in fp16. The
# upper part of fp16's range, on the other hand, is empty.
#
# So shift everything: multiply the loss by a number S, the **loss scale**. By the chain rule every gradient in backward
# is then S times as large. Afterwards the weights' gradients are divided by S. When S is a power of two, neither of the
# two loses a digit. Two rules follow.
#
# 1. **Before backward.** Scaling the gradients afterwards brings nothing back: what became 0 in backward stays 0.
# 2. **Unscale in fp32.** Divided by S in fp16, the small gradients would become 0 after all. Convert first.

# %%
# NBVAL_CHECK_OUTPUT
tiny, S = 2.0**-30, 2.0**16
too_late = torch.tensor(tiny).half() * S
in_time = torch.tensor(tiny * S).half()  # as backward of the scaled loss leaves it
print("scaled after backward:     ", too_late.item())
print("scaled before, as it is:   ", in_time.item())
print("then unscaled in fp16:     ", (in_time / S).item())
print("then unscaled in fp32:     ", (in_time.float() / S).item(), "=", tiny)

# %% [markdown]
# ### Break it on purpose: a scale that is too high
#
# The table above also shows the other end. Times $2^{24}$, many gradients leave the range at the top and become inf.
# What happens if one steps with them all the same? Here is plain gradient descent, done by hand:

# %%
inputs, targets = batch_of(0)
broken = new_model(torch.float16)
(loss_function(broken(inputs), targets) * 2.0**24).backward()
with torch.no_grad():
    gradients = torch.cat([parameter.grad.flatten() for parameter in broken.parameters()])
    for parameter in broken.parameters():
        parameter -= 0.1 * (parameter.grad.float() / 2.0**24).half()
    weights = torch.cat([parameter.flatten() for parameter in broken.parameters()])
    for name, numbers in (("gradients", gradients), ("weights", weights)):
        share = 100 * (~numbers.isfinite()).double().mean().item()
        print(f"{name} that are inf or NaN: {share:.0f} %")
    print("loss in the next step:", loss_function(broken(inputs), targets).item())

# %% [markdown]
# (More than in the table: inf in the middle of backward spreads to all that is computed from it, and inf minus inf is
# NaN.) One such step and the model is lost. There is no way back from NaN.
#
# ### Dynamic loss scaling
#
# Which S is right? It should be as high as possible, but not so high that a gradient overflows, and that changes during
# training. Micikevicius et al. (section 3.2) choose a number beforehand, and skip the update when a gradient overflows.
# Today S is *tried out*, as NVIDIA's guide to mixed precision and PyTorch's `GradScaler` do it:
#
# - Start high. After backward, look at **all** gradients. If any one is inf or NaN, **skip the step**: make no use of
#   these gradients, and halve S. Nothing else changes.
# - After some number of steps in a row without overflow (2000 is common), double S.
#
# A skipped step is harmless when it really changes nothing. "Nothing" means the weights, the master weights, both
# moments *and the step count*: it is as if this batch had never been drawn.
#
# ## 5. The engine
#
# Everything together, for one parameter w with master weight W:
#
# $$g = \frac{\text{float32}(\texttt{w.grad})}{S}, \qquad
# m \leftarrow \beta_1 m + (1-\beta_1)\,g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\,g^2,$$
#
# $$\hat m = \frac{m}{1-\beta_1^{\,t}}, \qquad \hat v = \frac{v}{1-\beta_2^{\,t}}, \qquad
# W \leftarrow (1-\eta\lambda)\,W - \eta\,\frac{\hat m}{\sqrt{\hat v}+\epsilon}, \qquad w = \text{float16}(W).$$
#
# Here t counts the steps that were made, from 1; $\eta$ is `lr`, $\lambda$ is `weight_decay`. This is AdamW (Loshchilov
# & Hutter 2019, algorithm 2), in PyTorch's form: in the paper the decay is multiplied by the schedule of the learning
# rate only, in PyTorch by the whole learning rate, so the factor is $1-\eta\lambda$. The moments start at 0, so at
# first they are too small: in step 1, m is only $(1-\beta_1)\,g$. Dividing by $1-\beta^t$ makes up for that.
#
# **Predict.** How many bytes per parameter will your engine hold beside the weights and their gradients?

# %%
engine_bytes = predict("bytes per parameter that the engine adds, at rest")

# %% [markdown]
# ### Exercise 01.MixedPrecisionAdam
#
# *Difficulty: medium. Importance: high, every engine of this course has this shape. Give it 30 minutes.*
#
# **Contract.** `__init__` and `zero_grad` are begun for you. Write the rest.
#
# - **`__init__`**: makes the fp32 master weights from the parameters as they are given, once. Keep what you hold in
#   `self.state`, a dict whose keys are the parameters: for each one a dict with the fp32 tensors `"master"`,
#   `"first_moment"` and `"second_moment"`. Your own `model_state_bytes` and later labs count them there.
#   Parameters may be fp16, bf16 or fp32; the masters have memory of their own in any case.
#   The step count t is a plain number, not a tensor. One count per parameter or one for all: both are fine.
# - **`backward(loss)`**: multiplies the loss by the scale and calls its backward. Afterwards `.grad` holds scaled
#   gradients. Like `loss.backward()`, it adds to what is there, and leaves the loss as it is.
# - **`step()`**: makes a step, and returns True. If any gradient holds an inf or a NaN it returns False instead, and
#   changes nothing but the scale, which halves, though never below 1. After `growth_interval` steps in a row without
#   overflow the scale doubles, and the counting starts anew, as it does after an overflow. Parameters whose `.grad` is
#   None are left alone. In no case are the gradients cleared: the caller calls `zero_grad()`.
# - **On several ranks**, that is when `torch.distributed` is initialised, all ranks decide alike: if one overflows, all
#   skip. One all-reduce of one number is enough. `step` does not average gradients; that is lab 03's task.
# - **Memory**: between two steps it holds 12 bytes per element, and nothing of what is needed only in a step.
#
# <details><summary>Hint 1: where to begin</summary>
#
# Do without overflow first: `__init__`, `backward`, and a `step` that updates each parameter by the formulas above and
# returns True. Run the check: it tells how far that gets you. Then add the skip, then the ranks.
# </details>
#
# <details><summary>Hint 2: copies and in-place operations</summary>
#
# `x.to(torch.float32)` gives back x itself when it is float32 already; `copy=True` makes a copy in any case. The
# parameter has to change in place, because the model goes on using this very tensor: `parameter.copy_(master)` does
# that, and rounds to the parameter's type. For the state it is convenient: `mul_`, `add_`, and `m.lerp_(g, 1 - b)`,
# which is b m + (1 - b) g. `@torch.no_grad()` above `step` keeps autograd out of it.
# </details>
#
# <details><summary>Hint 3: decide first, then act</summary>
#
# Look at all gradients before you change anything: an overflow in the last one must stop the update of the first.
# `gradient.isfinite().all()` is False for inf, -inf and NaN alike. The loss tells nothing, it can be finite when a
# gradient is not.
# </details>
#
# <details><summary>Hint 4: the flag</summary>
#
# Every rank must make the same calls, also one that has no overflow, or no gradient at all. Otherwise the others wait
# for it for ever.
# ```python
# if dist.is_initialized():
#     flag = torch.tensor([1.0 if bad else 0.0], device=...)  # the parameters' device
#     dist.all_reduce(flag, op=...)  # MAX, or SUM
#     bad = flag.item() ...
# ```
# </details>
#
# <details><summary>Hint 5: the end of step</summary>
#
# Unscale with the scale that *this* step's gradients were made with. So the scale changes at the very end.
# </details>


# %% nbgrader={"grade": false, "grade_id": "MixedPrecisionAdam", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class MixedPrecisionAdam:
    """AdamW on fp16 (or bf16, fp32) parameters, with master weights and dynamic loss scaling.

    Holds 12 bytes per element beside weights and gradients: master weights and moments in fp32.
    Sends one number per step when there are several ranks.
    """

    def __init__(
        self,
        parameters,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        scale=2.0**16,
        growth_interval=2000,
    ):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.scale, self.growth_interval = float(scale), growth_interval
        self.steps_without_overflow = 0
        self.state = {}  # for each parameter a dict with "master", "first_moment", ...
        ### BEGIN SOLUTION
        for parameter in self.parameters:
            # Without copy=True an fp32 parameter would be its own master.
            master = parameter.detach().to(torch.float32, copy=True)
            self.state[parameter] = {
                "master": master,
                "first_moment": torch.zeros_like(master),
                "second_moment": torch.zeros_like(master),
                "step": 0,
            }
        ### END SOLUTION

    def backward(self, loss):
        """Backward of the loss times the scale: `.grad` holds scaled gradients."""
        ### BEGIN SOLUTION
        (loss * self.scale).backward()
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        """One AdamW step, and True. When any rank has an overflow: no change, and False."""
        ### BEGIN SOLUTION
        with_gradient = [each for each in self.parameters if each.grad is not None]
        if self._overflow_on_any_rank(with_gradient):
            self.scale = max(self.scale / 2, 1.0)
            self.steps_without_overflow = 0
            return False
        for parameter in with_gradient:
            self._update(parameter, **self.state[parameter])
        self.steps_without_overflow += 1
        if self.steps_without_overflow == self.growth_interval:
            self.scale *= 2
            self.steps_without_overflow = 0
        return True

    def _overflow_on_any_rank(self, parameters):
        finite = all(parameter.grad.isfinite().all() for parameter in parameters)
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = self.parameters[0].device
            flag = torch.tensor(0.0 if finite else 1.0, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return flag.item() > 0
        return not finite

    def _update(self, parameter, master, first_moment, second_moment, step):
        beta1, beta2 = self.betas
        step += 1
        # To fp32 first: divided in fp16, the small ones would become 0.
        gradient = parameter.grad.float() / self.scale
        first_moment.lerp_(gradient, 1 - beta1)
        second_moment.lerp_(gradient.square(), 1 - beta2)
        mean = first_moment / (1 - beta1**step)
        deviation = (second_moment / (1 - beta2**step)).sqrt()
        master.mul_(1 - self.lr * self.weight_decay)
        master.sub_(self.lr * mean / (deviation + self.eps))
        parameter.copy_(master)
        self.state[parameter]["step"] = step
        ### END SOLUTION

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


# %% nbgrader={"grade": true, "grade_id": "check-MixedPrecisionAdam", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
check("01.MixedPrecisionAdam", MixedPrecisionAdam)

# %% [markdown]
# ## 6. Predicted and measured: 2 + 2 + 12
#
# The GPT in fp16, one step with your engine, in a process of its own. `label` tells the memory meter what your tensors
# are for: it knows PyTorch's optimizers, but not yours.


# %%
def one_step_with_the_engine(dtype):
    """Bytes after one step: counted, the optimizer's by kind, and by the meter."""
    model = new_model(dtype, device())
    engine = MixedPrecisionAdam(model.parameters())
    state = [value for each in engine.state.values() for value in each.values()]
    label("optimizer", [value for value in state if torch.is_tensor(value)])
    inputs, targets = batch_of(0, where=device())
    engine.backward(loss_function(model(inputs), targets))
    engine.step()
    counted = model_state_bytes(model, engine)
    return counted, memory_so_far().at_end, by_kind(engine)


run = launch(one_step_with_the_engine, 1, args=(torch.float16,), device=DEVICE)
engine_counted, engine_metered, kinds = run.results[0]

# %%
# NBVAL_CHECK_OUTPUT
MIXED = theory.MIXED_PRECISION_ADAM
table(
    [
        {
            "state": state,
            "formula": f"{per_parameter} psi",
            "predicted": per_parameter * PSI,
            "measured": engine_counted[state],
            "memory meter": by_meter,
        }
        for state, per_parameter, by_meter in (
            ("weights", MIXED.weight, engine_metered.parameters),
            ("gradients", MIXED.gradient, engine_metered.gradients),
            ("optimizer", MIXED.optimizer, engine_metered.optimizer),
        )
    ],
    equal=("predicted", "measured"),
)

# %%
engine_bytes.compare(engine_counted["optimizer"] / PSI)

# %% [markdown]
# And the picture to remember. W are the weights and G the gradients: what the model computes with. M, m and v are
# master weights, first and second moment: what only the optimizer looks at, three quarters of everything.

# %% tags=["picture"]
FP32 = theory.FP32_ADAM
bars = {
    "fp32, AdamW": {
        "weights": fp32_counted["weights"],
        "gradients": fp32_counted["gradients"],
        **fp32_kinds,
    },
    "fp16, your engine": {
        "weights": engine_counted["weights"],
        "gradients": engine_counted["gradients"],
        **kinds,
    },
}
as_svg(
    state_bars(
        bars,
        predicted={
            "fp32, AdamW": FP32.total * PSI,
            "fp16, your engine": MIXED.total * PSI,
        },
        title=f"model states of {PSI:,} parameters",
    ),
    "Model states, measured: fp32 4 + 4 + 8, mixed precision 2 + 2 + 12 bytes per parameter",
)

# %% [markdown]
# Where would you start to save, with N GPUs that all hold the same? ZeRO-1 starts with the upper three pieces: each
# GPU keeps one N-th of them, and updates one N-th of the weights.
#
# ## 7. Watch the scale find its place
#
# Your engine on the GPT in fp16. The scale starts at $2^{24}$, far too high, and grows again after 5 good steps, so
# that you need not wait. The overflows are real: nothing is made up here but the impatience.


# %%
def train_with(engine, model, steps, passages=PASSAGES):
    """Trains with an engine. Returns, per step: loss, scale used, whether a step was made."""
    losses, scales, stepped = [], [], []
    for step in range(steps):
        inputs, targets = batch_of(step, passages)
        loss = loss_function(model(inputs), targets)
        losses.append(loss.item())
        scales.append(engine.scale)
        engine.backward(loss)
        stepped.append(engine.step())
        engine.zero_grad()
    return losses, scales, stepped


print("30 steps in fp16: seconds on a quiet machine, a minute or two on a busy one", flush=True)
model = new_model(torch.float16)
engine = MixedPrecisionAdam(model.parameters(), lr=3e-3, scale=2.0**24, growth_interval=5)
losses, scales, stepped = train_with(engine, model, steps=30, passages=12)
print(
    f"{stepped.count(True)} steps made, {stepped.count(False)} skipped;"
    f" loss {losses[0]:.3f} to {losses[-1]:.3f}"
)
scale_steps(scales, stepped)

# %% [markdown]
# It falls until the largest gradient fits, then probes upwards again and again, and pays one skipped step for each
# probe that goes too far. With 2000 steps between the probes that is a price of 0.05 %.
#
# ## 8. Does it learn the same?
#
# The same first weights, the same batches: ordinary AdamW in fp32, your engine in fp16, and your engine in bf16. (All
# without weight decay.) bf16 has the range of fp32, so it needs no loss scaling: a scale of 1 does nothing. It has
# fewer digits instead. It needs master weights all the more.

# %%
LEARNING_RATE = 3e-3
model = new_model()
fp32_losses = train(
    model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
)

print(f"now {STEPS} steps in fp16: seconds, or a minute or two on a busy machine", flush=True)
model = new_model(torch.float16)
fp16_losses, _, stepped = train_with(
    MixedPrecisionAdam(model.parameters(), lr=LEARNING_RATE), model, STEPS
)

model = new_model(torch.bfloat16)
bf16_losses, _, _ = train_with(
    MixedPrecisionAdam(model.parameters(), lr=LEARNING_RATE, scale=1.0), model, STEPS
)


def furthest(losses):
    """The largest difference from the fp32 losses, in any step."""
    return max(abs(one - other) for one, other in zip(losses, fp32_losses, strict=True))


print(
    f"fp16: {stepped.count(False)} steps skipped,"
    f" differs from fp32 by at most {furthest(fp16_losses):.3f}"
)
print(f"bf16: differs from fp32 by at most {furthest(bf16_losses):.3f}")
curves(
    {
        "fp32, AdamW": fp32_losses,
        "fp16, your engine": fp16_losses,
        "bf16, your engine": bf16_losses,
    },
    ylabel="loss",
    title="the same batches in three precisions",
)

# %% [markdown]
# ### Break it on purpose: 16 bits and no master weights
#
# The tempting short cut: `model.bfloat16()`, and PyTorch's ordinary AdamW on top. It runs, and it holds 2 + 2 + 4 = 8
# bytes per parameter. Why not always? In this short cut both moments are bf16, too. To tell the two apart there is a
# third run: your engine with its fp32 moments, but before each step its master weights are set back to what the bf16
# weights are.
#
# Late in training the weights have grown and the learning rate has been lowered. Here is such a moment: the model that
# was trained in section 4 goes on with a learning rate of 0.00003, on one and the same batch, so that the loss
# does not depend on which batch it is.


# %%
def continue_training(make_step, steps=30):
    """From the trained model, in bf16: losses, and the percentage of weights that moved."""
    model = GPT(SMALL).to(HERE)
    model.load_state_dict(trained.state_dict())
    model = model.bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = make_step(model)
    inputs, targets = batch_of(1000)
    losses = []
    for _ in range(steps):
        loss = loss_function(model(inputs), targets)
        losses.append(loss.item())
        step(loss)
    changed = [
        (now != then).sum().item() for now, then in zip(model.parameters(), before, strict=True)
    ]
    return losses, 100 * sum(changed) / PSI


def with_master_weights(model):
    engine = MixedPrecisionAdam(model.parameters(), lr=3e-5, scale=1.0)

    def step(loss):
        engine.backward(loss)
        engine.step()
        engine.zero_grad()

    return step


def without_master_weights(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0)

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fp32_moments_only(model):
    engine = MixedPrecisionAdam(model.parameters(), lr=3e-5, scale=1.0)

    def step(loss):
        engine.backward(loss)
        for parameter, state in engine.state.items():
            state["master"].copy_(parameter.detach())  # what was rounded off is forgotten
        engine.step()
        engine.zero_grad()

    return step


with_master, moved_with = continue_training(with_master_weights)
without_master, moved_without = continue_training(without_master_weights)
moments_only, moved_moments_only = continue_training(fp32_moments_only)
table(
    [
        {
            "in 30 steps": name,
            "weights that moved, %": moved,
            "loss at first": losses[0],
            "at last": losses[-1],
            "fell by": losses[0] - losses[-1],
        }
        for name, losses, moved in (
            ("master weights", with_master, moved_with),
            ("no master weights", without_master, moved_without),
            ("no master weights, fp32 moments", moments_only, moved_moments_only),
        )
    ]
)

# %%
curves(
    {"bf16, master weights": with_master, "bf16, no master weights": without_master},
    ylabel="loss",
    title="a late stage of training, one batch",
)

# %% [markdown]
# Without master weights most updates are rounded away, step after step. Only the small weights, about a quarter, still
# move, since the spacing is fine where they are. Nothing crashes and no number is inf. The loss still falls, but
# several times more slowly, and the training looks as if it were nearly done. The third row shows that fp32 moments do
# not help: it is the weights. Master weights cost 4 bytes per parameter, and this is what they buy.
#
# ## 9. On several ranks: skip together
#
# In data-parallel training every rank has its own part of the batch, and all ranks must make the same updates.
# Suppose that the gradients of one rank overflow, and only this rank skips. From then on its weights differ from those
# of the others, for good. So all must know. One number per rank is enough: 1 for an overflow, 0 for none. An all-reduce
# with MAX gives everybody the largest.
#
# **Predict.** Below, every rank makes 4 steps with your engine, on its own; one of the steps overflows on one rank. How
# many calls of `torch.distributed` does a rank make in all?

# %%
flag_calls = predict("calls that a rank makes in 4 steps", N=WORLD_SIZE)


# %%
def one_rank_overflows(steps, bad_step, bad_rank):
    """Each rank trains on its own part of the batch; once, one rank's loss is far too large."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = new_model(torch.float16, device())
    engine = MixedPrecisionAdam(model.parameters(), lr=1e-3)
    history = []
    for step in range(steps):
        inputs, targets = batch_of(step, where=device())
        mine = slice(rank * PASSAGES // world_size, (rank + 1) * PASSAGES // world_size)
        loss = loss_function(model(inputs[mine]), targets[mine])
        if step == bad_step and rank == bad_rank:
            loss = loss * 2.0**20
        engine.backward(loss)
        history.append((engine.step(), engine.scale))
        engine.zero_grad()
    return history


BAD_RANK = 1
WORDS = {True: "stepped", False: "skipped"}
run = launch(one_rank_overflows, WORLD_SIZE, args=(4, 2, BAD_RANK), device=DEVICE)

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "step": step,
            **{
                f"rank {rank}": f"{WORDS[bool(history[step][0])]}, scale {history[step][1]:g}"
                for rank, history in enumerate(run.results)
            },
        }
        for step in range(4)
    ],
    title=f"the gradients of rank {BAD_RANK} overflow in step 2",
)

# %%
flag_calls.compare(len(run.calls[0]))
print(f"booked for rank 0: {run.traffic[0].sent / 4:g} bytes per step")

# %% [markdown]
# One call per step, whether it overflows or not. The bytes are *booked*, by the formula of lab 00 for a ring,
# $2\frac{N-1}{N}$ times the 4 bytes of the number; one number cannot really be cut into N pieces, and PyTorch does not
# tell what it sends. Either way it is nothing beside $2\psi$ bytes of gradients. What the call costs is waiting: every
# rank learns only with the slowest one whether it may step.
#
# (Your ranks still train apart from each other, each on its own part. Averaging the gradients is lab 03.)
#
# ## 10. Splitting a batch
#
# One question is left before there can be many ranks. If every rank computes gradients on a part of the batch only,
# how does one get the gradient of the whole batch? Let the batch have B samples, and let $g_s$ be the gradient of
# sample s alone. The loss is a mean, so its gradient is $g = \frac1B \sum_s g_s$. Cut the batch into N parts of B/N
# samples. Part i has the gradient $G_i = \frac{N}{B}\sum_{s \in i} g_s$, and
#
# $$\frac1N \sum_i G_i = \frac1N \cdot \frac{N}{B} \sum_i \sum_{s \in i} g_s = \frac1B\sum_s g_s = g .$$
#
# The mean of the parts' gradients **is** the gradient of the whole batch. And if the parts are not equal, but have
# $B_i$ samples each? Then $G_i = \frac{1}{B_i}\sum_{s\in i} g_s$, and each must be weighted by its share of the batch:
#
# $$\sum_i \frac{B_i}{B}\, G_i = \sum_i \frac{B_i}{B} \cdot \frac{1}{B_i}\sum_{s\in i} g_s = g .$$
#
# **Predict.** 13 passages on N ranks, in parts as equal as possible (13 = 4 + 3 + 3 + 3 for N = 4). By how many percent
# is the *plain* mean of the parts' gradients off, in the length of the vector?

# %%
plain_error = predict("error of the plain mean, 13 passages", unit="%", N=WORLD_SIZE)


# %%
def gradient_of(model, inputs, targets):
    """All gradients of the mean loss, as one vector. Nothing is rounded to fp32 on the way."""
    model.zero_grad()
    logits = model(inputs)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def split_errors(passages, parts, dtype):
    """Relative errors of the plain and the weighted mean of the parts' gradients."""
    model = new_model(dtype)
    inputs, targets = batch_of(0, passages)
    whole = gradient_of(model, inputs, targets)
    plain, weighted, sizes = torch.zeros_like(whole), torch.zeros_like(whole), []
    for mine in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
        gradient = gradient_of(model, *mine)
        plain += gradient / parts
        weighted += gradient * len(mine[0]) / passages
        sizes.append(len(mine[0]))
    return sizes, [((mean - whole).norm() / whole.norm()).item() for mean in (plain, weighted)]


rows = []
single, double = torch.float32, torch.float64
both = [
    (passages, WORLD_SIZE, dtype) for passages in (PASSAGES, 13) for dtype in (single, double)
]
for passages, parts, dtype in (*both, (13, 8, double), (5, 4, double), (3, 2, double)):
    sizes, (plain, weighted) = split_errors(passages, parts, dtype)
    rows.append(
        {
            "batch": f"{passages} = {' + '.join(map(str, sizes))}",
            "type": str(dtype).removeprefix("torch."),
            "plain mean, error": plain,
            "weighted mean, error": weighted,
        }
    )
table(rows, title="gradient from the parts against gradient of the whole batch, relative")

# %%
plain_error.compare(100 * rows[2]["plain mean, error"])

# %% [markdown]
# What is left where the mean is right is rounding: it shrinks from fp32 to fp64, because additions are made in another
# order. The error of the plain mean does not shrink: it is an error of arithmetic. Passages in small parts count for
# too much. How much it is depends on how uneven the parts are: a few percent where 13 are cut into parts of 4 and 3,
# and a tenth and more where the parts have 2 and 1. Training still works, and so this mistake can live long.
#
# ### One more trap: the sum of fp16 gradients
#
# A mean is a sum divided by N. With fp16 gradients, what comes first?

# %%
# NBVAL_CHECK_OUTPUT
gradient = torch.tensor(40000.0, dtype=torch.float16)  # on two ranks
print("sum, then divide:", ((gradient + gradient) / 2).item())
print("divide, then sum:", (gradient / 2 + gradient / 2).item())

# %% [markdown]
# Each gradient is fine, and so is their mean, but the sum is beyond 65504. Dividing first is safe at the top, and costs
# $\log_2 N$ bits of range at the bottom, which the loss scale makes up for. The other way out is to add in fp32.
#
# ## 11. The first row of the ledger
#
# Each lab of this course trains this same GPT on the same batch, and records what that costs: bytes held, bytes sent,
# messages. Here is the first row, one process that does everything alone.


# %%
def train_alone(steps=2):
    """Bytes of model states between two steps, before the gradients are cleared."""
    model = new_model(torch.float16, device())
    engine = MixedPrecisionAdam(model.parameters())
    for step in range(steps):
        engine.zero_grad()
        inputs, targets = batch_of(step, where=device())
        engine.backward(loss_function(model(inputs), targets))
        engine.step()
    return sum(model_state_bytes(model, engine).values())


run = launch(train_alone, 1, device=DEVICE)
record(
    LedgerRow(
        lab="01",
        strategy="one process",
        world_size=WORLD_SIZE,
        held=run.results[0],
        held_formula=theory.model_state_bytes("ddp", PSI, 1),
        sent=run.traffic[0].sent,
        sent_formula=0,
        messages=run.traffic[0].messages_sent,
        limited_by="one device computes and holds all",
    )
)

# %% [markdown]
# ## 12. What production systems do differently
#
# - **PyTorch's autocast** keeps the weights themselves in fp32 and converts them to 16 bits where an operation needs
#   it. No 16-bit copy is kept from step to step, and gradients are fp32: 4 + 4 + 8 = 16 bytes again. Its `GradScaler`
#   is the dynamic loss scale of this lab, with the same defaults: $2^{16}$, halved, doubled after 2000 steps. Engines
#   for very large models (DeepSpeed, Megatron) hold 16-bit weights and fp32 masters, as you do: what travels is then 16
#   bits.
# - **bf16 has nearly replaced fp16** on hardware that has it. No scaling, no skips. The master weights stay.
# - **Fused kernels** update all parameters in one pass over the memory. Your step makes a dozen passes.
# - **The overflow flag stays on the GPU.** `flag.item()` makes the CPU wait for everything before it. With a
#   fused optimizer, `GradScaler` hands the flag to the optimizer's kernel instead.
# - **Fewer bits still.** 8-bit optimizers keep both moments in one byte each, with a scale per block of elements.
#
# ## 13. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** A model has 7.5 billion parameters and is trained with your engine. How many bytes are the model states? And
# if the gradients were kept in fp32 instead of fp16?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-bytes", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 16 x 7.5 billion = 120 GB. With fp32 gradients 2 bytes per parameter come on top: 135 GB.

# %% [markdown]
# **Q2.** A colleague reports that in his engine a skipped step sets all gradients to 0 and then steps as usual: "zero
# gradients, so nothing changes". Name three things that change.

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-skip", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Both moments shrink by their beta, since a gradient of 0 is averaged in. The step count goes up, so the bias
# corrections change. And the weights still move: along the old first moment, and by weight decay.

# %% [markdown]
# **Q3.** Adam divides the first moment by the root of the second. So a forgotten division by S nearly cancels out, and
# the loss curve looks healthy. What in Adam does *not* cancel, and when does it matter?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-hidden", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# eps does not cancel: with gradients S times too large it is S times too small beside them. It matters for parameters
# whose true gradients are of the size of eps or below. (So does anything else that has a size of its own: clipping by
# norm, or a change of S between two steps, which mixes gradients of two sizes in one moment.)

# %% [markdown]
# **Q4.** On 4 ranks, a batch of 13 passages is split as 4 + 3 + 3 + 3, and the gradients are averaged with equal
# weights. How much does a passage of the first rank count, compared to one of the others?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-uneven", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# On the first rank a passage counts 1/4 of 1/4 = 1/16, on the others 1/4 of 1/3 = 1/12: so 3/4 as much. It should be
# 1/13 for each.

# %% [markdown]
# ## Sources
#
# - P. Micikevicius et al.: *Mixed precision training*, ICLR 2018, arXiv 1710.03740: master weights (section 3.1), loss
#   scaling with a number that is chosen, and skipping (section 3.2), a histogram of gradients (figure 3).
# - NVIDIA: *Train with mixed precision*, user's guide, on choosing a scaling factor; PyTorch documentation,
#   `torch.amp.GradScaler`: halving and doubling the scale.
# - I. Loshchilov, F. Hutter: *Decoupled weight decay regularization*, ICLR 2019, arXiv 1711.05101, algorithm 2: AdamW.
#   PyTorch documentation, `torch.optim.AdamW`: the form with the whole learning rate.
# - D. Kingma, J. Ba: *Adam: a method for stochastic optimization*, ICLR 2015, arXiv 1412.6980, section 3: the bias
#   correction.
# - S. Rajbhandari et al.: *ZeRO: Memory optimizations toward training trillion parameter models*, arXiv 1910.02054,
#   section 3.1: 16 bytes per parameter.
# - IEEE 754-2019, section 3: formats of floating-point numbers. D. Kalamkar et al.: *A study of BFLOAT16 for deep
#   learning training*, arXiv 1905.12322.
# - NVIDIA: *A100 Tensor Core GPU* data sheet, 2020: peak rates. T. Dettmers et al.: *8-bit optimizers via block-wise
#   quantization*, arXiv 2110.02861.

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
# # 08 - ZeRO-3: weights that are there when they are needed
#
# **You build:** `Zero3`, an engine in which no rank holds the whole model at any time. **Time:** 90 minutes.
#
# **Where this stands.** With DDP every rank held 16 bytes for each of the $\psi$ parameters. ZeRO-1 split the 12 bytes
# of the optimizer over the ranks, ZeRO-2 the 2 bytes of the gradients. What is left is $2\psi + 14\psi/N$. However many
# ranks there are, the $2\psi$ stay: each of them holds all weights. A model whose weights alone do not fit on one GPU
# cannot be trained so.
#
# But a rank computes with one layer at a time. Why should it hold the others?
#
# At the end of this notebook your engine trains a GPT while each rank holds $16\psi'/N$ bytes between two steps, to the
# byte, and while it computes the weights and gradients of a few layers more. You watch a layer's weights come and go on
# a map of who holds what, pay 1.5 times the bytes of DDP for it, and hide most of them. Then you hold it against FSDP2,
# which is the same idea in torch itself.
#
# **Letters.** N is the number of ranks, $\psi$ the number of parameters. $\psi'$ is $\psi$ with the padding that makes
# each layer divisible by N: at most N-1 elements a layer.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes), at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0
LATENCY = 0.0002  # seconds that a message costs on the link of section 8, however small it is
BANDWIDTH = 25e6  # bytes per second that the link carries
BLOCK = 0.024  # seconds that a block's backward takes there; its forward takes half of that
LOSS_STEPS = 100  # of the loss curves in section 11

# %% tags=["export"]
import contextlib
from collections import Counter
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardlab import reuse
from shardlab.meters import label

# %%
import time
from itertools import pairwise

import torch.distributed as dist

from shardlab import check, device, launch, predict, show, table, theory
from shardlab.communicator import Library, mine_of
from shardlab.ledger import LedgerRow, record
from shardlab.meters import memory_so_far
from shardlab.model import GPT, SMALL, Size, loss_function
from shardlab.records import Link
from shardlab.shard_map import shard_map, watch_states
from shardlab.text import batch
from shardlab.timeline import timeline_of, watch_layers
from shardlab.widgets.curves import curves
from shardlab.widgets.timeline import compare

PASSAGES, LENGTH = 24, 32  # the course's batch: 24 passages of 32 characters
DEEP = Size(layers=4)  # twice as deep as the GPT of the other labs: more to see
PSI = GPT(DEEP).parameter_count

# %% [markdown]
# ## 1. What a layer-by-layer pass needs
#
# A forward pass runs layer 1, then layer 2, and so on. While layer 3 runs, the weights of all others lie idle. The
# backward pass runs the layers from the last to the first. To compute, layer 3 needs its weights once more: the
# gradient of its input is the gradient of its output times the weights. So:
#
# | layer 3 | its weights | its activations |
# |---|---|---|
# | before its forward | not needed | not there |
# | during its forward | **needed** | made |
# | until its backward | not needed | kept |
# | during its backward | **needed** | used, then freed |
# | afterwards, and in the optimizer's step | this rank's own part | not there |
#
# ZeRO's third stage, P$_{os+g+p}$ in the paper, follows from this table (Rajbhandari et al. 2020, section 5.3). The
# weights of each layer are cut in N chunks, and rank r keeps chunk r. Just before a layer runs, an **all-gather** makes
# it whole on every rank. As soon as it has run, each rank frees what is not its own. In backward the same once more.
#
# What does it cost? A step of ZeRO-2 sends $2\psi(N-1)/N$ elements: gradients are reduced and scattered, and new
# weights are gathered once, after the step. Now weights are gathered twice, for forward and for backward, and not at
# all after the step: every rank updates its own chunk, and the next forward will fetch it.
#
# **Predict.** How many elements does a rank send in a step, in units of $\psi(N-1)/N$? And how many bytes of model
# states does it hold between two steps, with 16-bit weights? The model is the GPT of section 6, with four blocks.

# %%
units_sent = predict("sent in a step, in units of psi (N-1)/N elements")

# %%
at_rest = predict("held between two steps", unit="bytes", psi=PSI, N=WORLD_SIZE)

# %% [markdown]
# ## 2. By hand: gather, compute, free
#
# Here is the idea on the simplest model there is, a chain of `Linear` layers of equal size. `Sharded` cuts the weight
# of one layer into N chunks and keeps this rank's own. `gather` makes a whole tensor, fetches the other chunks, and
# sets `layer.weight.data`, which is the memory that a parameter stands for. `free` puts an empty tensor in its place.


# %%
SIDE, LAYERS = 240, 8
LAYER_BYTES = 4 * SIDE * SIDE  # float32


class Sharded:
    """A layer's weight. Each rank keeps a chunk, and all of it between gather() and free()."""

    def __init__(self, layer):
        self.layer, self.shape = layer, layer.weight.shape
        self.own = mine_of(layer.weight.detach().flatten()).clone()
        self.free()

    def gather(self):
        whole = self.own.new_empty(self.shape.numel())
        mine_of(whole).copy_(self.own)
        Library().all_gather(whole).wait()
        self.layer.weight.data = whole.view(self.shape)

    def free(self):
        self.layer.weight.data = self.own.new_empty(0)


def forward_by_hand(kind):
    """Whole weights after a chain's forward, in layers: by numel(), and by the memory meter."""
    layers = [torch.nn.Linear(SIDE, SIDE, bias=False).to(device()) for _ in range(LAYERS)]
    sharded = [kind(layer) for layer in layers]
    # As if another layer were in front, which will ask for the gradient of this input.
    hidden = torch.ones(2, SIDE, device=device(), requires_grad=True)
    for one in sharded:
        one.gather()
        hidden = one.layer(hidden)
        one.free()
    by_numel = sum(layer.weight.numel() for layer in layers) / (SIDE * SIDE)
    return by_numel, memory_so_far().at_end.parameters / LAYER_BYTES


# %% [markdown]
# **Predict.** The chain has LAYERS = 8 layers, and each has been freed behind it. When the forward pass is over, how
# many layers' whole weights does `numel()` see, summed over the parameters? And how many does the memory meter see,
# which counts a piece of memory as long as anybody holds on to it? (Whole weights alone: the chunks that a rank keeps
# for good are not among what the meter is asked for here.)

# %%
says_numel = predict("layers whole after forward, by numel()", LAYERS=LAYERS)

# %%
says_meter = predict("layers whole after forward, by the memory meter", LAYERS=LAYERS)

# %%
swapped = launch(forward_by_hand, WORLD_SIZE, args=(Sharded,), device=DEVICE)
says_numel.compare(swapped.results[0][0])

# %%
says_meter.compare(swapped.results[0][1])

# %% [markdown]
# ## 3. The trap: who else holds the weight
#
# All of it is still there. `numel()` says that the model is sharded, and the memory says that it is not. A check that
# looks at `numel()` accepts this engine. At the end of the forward pass, when memory is short, it has saved nothing.
#
# The autograd graph holds the weights. A `Linear` layer computes `inputs @ weight.t()`. For the backward pass the graph
# saves both factors, and the second is a **view**: a tensor of its own that refers to the same memory, called the
# *storage*. Now `layer.weight.data = ...` gives the parameter another storage. The view keeps the old one, and so the
# old one stays alive until backward has passed by.
#
# Here is the whole matter on one small layer, in this process, without ranks.

# %%
weight = torch.nn.Parameter(torch.eye(3))
inputs = torch.ones(2, 3, requires_grad=True)
output = torch.nn.functional.linear(inputs, weight)
saved = output.grad_fn._saved_mat2  # what the graph has kept: weight.t()
storage = weight.untyped_storage()
print("same storage:", saved.untyped_storage().data_ptr() == storage.data_ptr())

# %% [markdown]
# The way out: do not take the storage away from the parameter, take the **memory away from the storage**.
# `untyped_storage().resize_(0)` frees it, and everybody who refers to this storage sees that: the parameter, the view
# in the graph, all alike. Before backward the storage gets its memory back and is filled again. The graph has noticed
# nothing. It holds the same storage as ever.

# %%
kept = weight.detach().clone()
storage.resize_(0)  # free
size = saved.untyped_storage().nbytes()
print(
    f"the graph's tensor: shape {tuple(saved.shape)}, {size} bytes, address {saved.data_ptr()}"
)
try:
    output.sum().backward()  # too early
except RuntimeError as error:
    print(error)

# %%
storage.resize_(kept.nbytes)  # gather again, before backward
weight.data.copy_(kept)  # .data: autograd would count a change of the weight itself
output.sum().backward()
print("gradient of the inputs:", inputs.grad[0].tolist())

# %% [markdown]
# Between `resize_(0)` and the refill the graph's tensor says that it has 3 x 3 elements, and has no memory: its address
# is 0. The backward of a `Linear` looks at the storage first and raises the error above. Remember its words, *out of
# bounds for storage of size 0*: in the exercise they mean that backward has come before its gathering. Not every
# operation looks. `saved.sum()` and `print(saved)` read at address 0, and the process ends at once, without a word from
# Python (a *segmentation fault*). You can try it; it costs you the kernel.
#
# So there is a second half to freeing: the *parameter* must not be such a tensor. At rest we give it an empty one, with
# `parameter.data = torch.empty(0)`. If somebody then forgets to gather, he gets an error that can be read:

# %%
weight.data = torch.empty(0)
try:
    torch.nn.functional.linear(inputs, weight)
except RuntimeError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# `vec (0)` is the empty weight. Now two hold tensors over freed storages: the graph, which reads them in backward
# alone, when we have gathered again; and `whole` below, which nobody reads before it is filled.


# %%
class Emptied(Sharded):
    """As before, but `whole` is one tensor for ever, and free() takes its memory away."""

    def __init__(self, layer):
        self.whole = layer.weight.data.flatten()  # .data: changes are not counted
        super().__init__(layer)

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        mine_of(self.whole).copy_(self.own)
        Library().all_gather(self.whole).wait()
        self.layer.weight.data = self.whole.view(self.shape)

    def free(self):
        super().free()
        self.whole.untyped_storage().resize_(0)


emptied = launch(forward_by_hand, WORLD_SIZE, args=(Emptied,), device=DEVICE)

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "free()": way,
            "by numel()": round(run.results[0][0], 1),
            "by the meter, predicted": predicted,
            "by the meter": round(run.results[0][1], 1),
        }
        for way, run, predicted in (
            ("swaps param.data", swapped, float(LAYERS)),
            ("empties the storage", emptied, 0.0),
        )
    ],
    equal=("by the meter, predicted", "by the meter"),
    title=f"layers whole after the forward of {LAYERS}",
)

# %% [markdown]
# (Not every layer is a trap. A convolution or a layer norm saves the parameter itself, not a view, and then a swap does
# free it. An embedding saves no weights at all. But nobody wants an engine that depends on this.)
#
# ## 4. Four moments
#
# In backward nobody calls our layers, so hooks must tell when one begins and ends. Here are the four moments:
#
# | moment | what tells us | what to do |
# |---|---|---|
# | forward begins | `register_forward_pre_hook` | gather |
# | forward has ended | `register_forward_hook(always_call=True)`: also after an exception | free |
# | backward begins | the gradient of the layer's **output** is there: a hook on that tensor | gather again |
# | backward has ended | the gradient of the layer's **input** is there: a hook on that tensor | free |
#
# A hook on a tensor, `tensor.register_hook(function)`, is called with the tensor's gradient when that is complete. Here
# is the backward of the chain, still by hand. The gradients are those of the same chain on one process.


# %%
def backward_by_hand(steps):
    """The gradient of every weight, and how many layers were whole at most."""
    torch.manual_seed(SEED)
    layers = [torch.nn.Linear(SIDE, SIDE, bias=False).to(device()) for _ in range(LAYERS)]
    hidden = torch.ones(2, SIDE, device=device(), requires_grad=True) * 1
    if steps == "one process":
        for layer in layers:
            hidden = layer(hidden)
    else:
        for one in [Emptied(layer) for layer in layers]:
            hidden.register_hook(lambda gradient, one=one: one.free())
            one.gather()
            hidden = one.layer(hidden)
            one.free()
            hidden.register_hook(lambda gradient, one=one: one.gather())
    began = memory_so_far().at_end.time
    hidden.square().mean().backward()
    most = max(each.parameters for each in memory_so_far().samples if each.time >= began)
    return [layer.weight.grad.cpu() for layer in layers], most / LAYER_BYTES


whole, cut = (
    launch(backward_by_hand, WORLD_SIZE, args=(steps,), device=DEVICE).results[0]
    for steps in ("one process", "gathered again")
)
largest = max((a - b).abs().max().item() for a, b in zip(whole[0], cut[0], strict=True))
print(f"largest difference of a gradient: {largest:.1e}")
print(f"layers whole in backward: {whole[1]:.1f} in one process, {cut[1]:.1f} gathered again")

# %% [markdown]
# Two at most. On the tensor between two layers hang two hooks. The one that gathers the layer whose turn comes was
# registered first and runs first; then the other frees the layer that is done.
#
# Why are the gradients of a layer's *weights* done when the one of its *input* is? Of all operations that are ready,
# autograd runs the one that forward made last. And a weight's gradient that is complete is stored before anything else.
# All that a layer computes is made after its input, so in backward all of it comes before the hook on the input. (That
# holds where one device does the work, and for a tensor that was itself computed. So the chain's first input is
# `ones(...) * 1`: a tensor that was not computed gets its gradient at once, like a weight.)
#
# ## 5. Units and passes
#
# For a real model four questions are left. The code below answers them; read it, you will build on it.
#
# **What is gathered at a time?** A **unit**: a child of the model, and of lists of modules each entry. For the GPT that
# is the embedding, each block, the last norm, the head. Smaller units need less memory at a time and more messages.
# What is left belongs to the model itself: its own parameters (the GPT's positions), and those that *several* layers
# share. A tied matrix, which is both embedding and head, would otherwise be gathered twice as often; here it is held
# through the whole forward, and through the whole backward. If parameters of a layer differ in dtype or group, the
# layer has several units.
#
# **What if a layer runs twice before its backward?** Two forwards, then one backward: that is common. Or an evaluation
# under `no_grad` between a forward and its backward. So what happens in backward belongs not to the layer but to one
# **pass** through it. A pass watches the tensors that go in and out. And a unit counts its **users**, the passes that
# need it now. It is freed when there is none.
#
# **When exactly is the gradient of an input complete?** If other layers use the same tensor, it is complete only when
# *they* are done as well: with a residual connection, long after this layer. So the pass gives the layer a **view** of
# its input. The view's gradient is this layer's alone. And not all inputs get a gradient: the embedding's are integers.
# Passes that nobody has ended are ended when backward is over.
#
# **And gradient checkpointing?** It throws activations away and runs the layer's forward again *within* backward
# ("recomputation"). The forward hooks then gather and free as ever; since users are counted, the layer stays whole for
# the backward that asked for it.

# %% tags=["export"]
_zero1 = reuse("06_zero1")
Bucket, Shard = _zero1.Bucket, _zero1.Shard
Zero2 = reuse("07_zero2").Zero2


def layers_of(model):
    """What is gathered one at a time: the model's children, and those of lists one by one."""
    for child in model.children():
        is_list = type(child).forward is torch.nn.Module.forward  # has none of its own
        if is_list or isinstance(child, torch.nn.Sequential):
            yield from layers_of(child)
        else:
            yield child


def parameters_by_layer(model):
    """[(layer, its parameters)]. First the model: its own, and what layers share."""
    layers = list(dict.fromkeys(layers_of(model)))
    count = Counter(parameter for layer in layers for parameter in layer.parameters())
    alone = [
        (layer, [one for one in layer.parameters() if count[one] == 1]) for layer in layers
    ]
    return [(model, [one for one in model.parameters() if count[one] != 1]), *alone]


# %% tags=["export"]
class Pass:
    """One forward of a layer, and its backward: tells when that begins and has ended."""

    def __init__(self, engine, units, before, following):
        self.engine, self.units = engine, units
        self.before = before  # the pass that began before this one, or None
        self.following = following  # units that forward needs next, if all goes as before
        self.under_way = False  # from the gradient of the output to that of the input
        self.expected = self.seen = 0  # gradients of inputs
        self.goes_back = False  # whether an output has a gradient

    @property
    def preceding(self):
        """Units that backward will need next."""
        return self.before.units if self.before is not None and self.before.goes_back else []

    def watch_input(self, value):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        view = value.view_as(value)  # whose gradient is complete when *this* layer is done
        view.register_hook(self.left)
        self.expected += 1
        return view

    def watch_output(self, value):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(self.entered)
            self.goes_back = True

    def entered(self, gradient):
        if not self.under_way:
            self.under_way = True
            self.engine.going_back.append(self)
            self.engine.before_backward(self)

    def left(self, gradient):
        self.seen += 1
        if self.seen == self.expected:
            self.end()

    def end(self):
        self.seen = 0
        if self.under_way:
            self.under_way = False
            self.engine.going_back.remove(self)
            self.engine.after_backward(self)


# %% [markdown]
# A pass also knows its neighbours: `following`, the units that the next layer will need, and `preceding`, those that
# backward will need next. You will use them to gather **ahead**: to start fetching a layer while another one computes.

# %% [markdown]
# ### Exercise 08.Zero3
#
# *Difficulty: hard, in small pieces. Importance: very high, this is the summit. Give it 60 minutes.*
#
# **Contract.** The engine is used as those of labs 06 and 07. New is where the weights are.
#
# `Unit` is lab 06's `Bucket`, N equal chunks, with the way of section 3. `unit.own` is this rank's chunk, always there;
# the optimizer updates it. `unit.weights` is the whole flat tensor, without memory at rest.
#
# - `start(communicator)`: unless the unit is whole or on its way already, gives `weights` its memory, writes `own` to
#   its place (`unit.mine`, a slice) and starts `communicator.all_gather(self.weights)`. The handle is kept in
#   `unit.gathering`: not None means "on its way".
# - `gather(communicator)`: afterwards the unit is whole: what is on its way has arrived, `whole` is True, the
#   parameters point to `weights` (`self.point_to(self.weights)`, from lab 06).
# - `free()`: afterwards the parameters are empty tensors, `weights` has no memory, `whole` is False, `gathering` is
#   None. A unit may be on its way for nothing when it is freed. Then it must arrive first: the operation writes to its
#   memory.
#
# `Zero3`:
#
# - `acquire(units)`: each gets one user more, and is whole. `release(units)`: one less, and who has none left is freed.
# - `before_forward(one)`, `after_forward(one)`, `before_backward(one)`, `after_backward(one)`: the four moments of
#   `one`, a `Pass`. Units needed now are `one.units`. With `self.prefetch`, what is needed next is *started* as soon as
#   this pass has what it needs: `one.following` in forward, `one.preceding` in backward.
# - `free_unused()`: frees every unit that has no user, whole or on its way.
# - `publish()`: called in `step()` when the shards have been updated. What does it have to send? And what must not
#   survive it?
# - `gathered()`: a context manager. Inside, all parameters are whole; behind it they are freed, also after an
#   exception. `step()` is not allowed inside: the parameters would stay at the old weights until the end of the block.
#
# The check does not look at how far ahead you fetch: no unit, one, or two, all are right. Section 8 draws it, and there
# you see whether your prefetch works.
#
# <details><summary>Hint 1: start, gather</summary>
#
# `start` does nothing if `self.whole or self.gathering is not None`. `gather` calls `start` first; then either the unit
# was whole, or there is a handle to wait for.
# </details>
#
# <details><summary>Hint 2: free</summary>
#
# Three things, in this order: wait for the handle if there is one; `parameter.data = self.own.new_empty(0)` for each of
# `self.parameters`; `self.weights.untyped_storage().resize_(0)`. Then the two attributes.
# </details>
#
# <details><summary>Hint 3: the four moments</summary>
#
# Two of them acquire, two release. After acquiring: `if self.prefetch:` start each unit of the list. Starting makes no
# user: if nobody comes for the unit, `free_unused` must find it. And why *after* acquiring, not before? Operations
# queue up, and what is needed first should be first in the queue.
# </details>
#
# <details><summary>Hint 4: publish</summary>
#
# It sends nothing: nobody needs the new weights before the next forward. But whatever has been fetched before the step
# is old after it. `self.free_unused()`. In this engine it finds nothing to free, since forward and backward have
# cleaned up behind themselves. It is there for engines that fetch earlier, such as the one of section 7.
# </details>
#
# <details><summary>Hint 5: almost the answer</summary>
#
# ```python
# def gather(self, communicator):
#     self.start(communicator)
#     if self.gathering is not None:
#         ...
#         self.point_to(self.weights)
#
# def release(self, units):
#     for unit in units:
#         unit.users -= 1
#         if unit.users == 0:
#             ...
#
# @contextlib.contextmanager
# def gathered(self):
#     self.acquire(self.units)
#     try:
#         yield
#     finally:
#         ...
# ```
# </details>


# %% nbgrader={"grade": false, "grade_id": "Zero3", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class Unit(Bucket):
    """Weights of a layer in N chunks: one is always here, all between gather() and free().

    Holds psi/N elements, and psi more while it is whole. Sends psi (N-1)/N for each gathering.
    """

    def __init__(self, parameters):
        super().__init__(parameters)  # whole, for the last time for long
        self.own = self.weights[self.mine].clone()
        label("parameters", [self.own])
        self.shard = None  # the optimizer's part, of units that are trained
        self.users = 0  # passes that need the whole weights now
        self.gathering = None  # the handle, while the other chunks are on their way
        self.whole = True
        self.free()

    def start(self, communicator):
        """Makes room, and starts to fetch the other chunks, unless that has been done."""
        ### BEGIN SOLUTION
        if not self.whole and self.gathering is None:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.weights[self.mine] = self.own
            self.gathering = communicator.all_gather(self.weights)
        ### END SOLUTION

    def gather(self, communicator):
        """Afterwards the parameters are whole."""
        ### BEGIN SOLUTION
        self.start(communicator)
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.whole = None, True
            self.point_to(self.weights)
        ### END SOLUTION

    def free(self):
        """Gives the memory back. What the graph has saved keeps its shape, without content."""
        ### BEGIN SOLUTION
        if self.gathering is not None:  # fetched for nothing; it writes there until it is done
            self.gathering.wait()
        for parameter in self.parameters:
            parameter.data = self.own.new_empty(0)
        self.weights.untyped_storage().resize_(0)
        self.gathering, self.whole = None, False
        ### END SOLUTION


class Zero3(Zero2):
    """Weights, gradients and optimizer state are split (Rajbhandari et al. 2020, section 5.3).

    Holds 16 psi/N bytes in fp16, and while it computes weights and gradients of two layers.
    Sends 3 psi (N-1)/N elements a step, and one number. All ranks must run the same layers.
    """

    def __init__(self, model, *arguments, prefetch=True, **options):
        super().__init__(model, *arguments, **options)  # makes what plan() returns
        self.prefetch = prefetch
        self.running = []  # passes whose forward has begun and not ended, the outermost first
        self.going_back = []  # passes whose backward has begun and not ended
        self.order, self.now = [], []  # the passes of the last forward, and of this one
        unit_of = {parameter: unit for unit in self.buckets for parameter in unit.parameters}
        units_of = {layer: [] for layer, _ in parameters_by_layer(model)}
        for layer, parameters, group in self.parts:
            units_of[layer].append(unit_of[parameters[0]] if group else Unit(parameters))
        self.units = [unit for units in units_of.values() for unit in units]
        for layer, units in units_of.items():
            begins = partial(self.forward_begins, units)
            layer.register_forward_pre_hook(begins, with_kwargs=True)
            layer.register_forward_hook(self.forward_ends, with_kwargs=True, always_call=True)

    def plan(self, bucket_bytes):
        """[(parameters, group)] of units that are trained, as backward completes them."""
        group_of = {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}
        self.parts = []  # (layer, parameters alike, their group; None if they are frozen)
        for layer, parameters in parameters_by_layer(self.module):
            alike = {}
            for parameter in parameters:
                if parameter.numel():
                    key = id(group_of.get(parameter)), parameter.dtype
                    alike.setdefault(key, []).append(parameter)
            self.parts += [(layer, part, group_of.get(part[0])) for part in alike.values()]
        count = Counter(layer for layer, _, _ in self.parts)
        # Flat gradients at one time: one travels, a layer's fill, the model's fill all along.
        self.most_flat = 1 + max(count.values(), default=0) + count[self.module]
        return [(part, group) for _, part, group in reversed(self.parts) if group]

    def new_bucket(self, parameters, group):
        unit = Unit(parameters)
        unit.shard = Shard(unit.own, group)
        unit.gradient = torch.zeros_like(unit.own)
        label("gradients", [unit.gradient])
        unit.flat = unit.handle = None
        return unit

    def new_pass(self, units):
        """A pass that knows its neighbours in the order of the forward."""
        if self.reducing:  # a forward within backward: a recomputation
            return Pass(self, units, None, [])
        last_time = self.order[len(self.now) : len(self.now) + 2]  # this pass and the next one
        as_ever = len(last_time) == 2 and last_time[0].units is units
        before = self.now[-1] if self.now else None
        one = Pass(self, units, before, last_time[1].units if as_ever else [])
        self.now.append(one)
        return one

    def forward_begins(self, units, layer, inputs, keywords):
        """A hook. Returns the inputs that the layer gets."""
        if layer is self.module:
            self.now = []
        one = self.new_pass(units)
        self.running.append(one)
        self.before_forward(one)
        if torch.is_grad_enabled():
            watched = tree_map(one.watch_input, (inputs, keywords))
            if one.expected:
                return watched
        return None

    def forward_ends(self, layer, inputs, keywords, output):
        """A hook, also called after an exception: then the output is None."""
        one = self.running.pop()
        self.after_forward(one)
        for value in tree_leaves(output):
            one.watch_output(value)
        if layer is self.module:
            self.order = self.now
            self.free_unused()

    def backward(self, loss):
        try:
            super().backward(loss)
        finally:
            for one in list(self.going_back):  # the inputs of these get no gradient
                one.end()
            self.free_unused()

    def acquire(self, units):
        """One more needs them: they are whole afterwards."""
        ### BEGIN SOLUTION
        for unit in units:
            unit.users += 1
            unit.gather(self.communicator)
        ### END SOLUTION

    def release(self, units):
        """One less needs them: who is not needed any more is freed."""
        ### BEGIN SOLUTION
        for unit in units:
            unit.users -= 1
            if unit.users == 0:
                unit.free()
        ### END SOLUTION

    def before_forward(self, one):
        ### BEGIN SOLUTION
        self.acquire(one.units)
        if self.prefetch:
            for unit in one.following:
                unit.start(self.communicator)
        ### END SOLUTION

    def after_forward(self, one):
        ### BEGIN SOLUTION
        self.release(one.units)
        ### END SOLUTION

    def before_backward(self, one):
        ### BEGIN SOLUTION
        self.acquire(one.units)
        if self.prefetch:
            for unit in one.preceding:
                unit.start(self.communicator)
        ### END SOLUTION

    def after_backward(self, one):
        ### BEGIN SOLUTION
        self.release(one.units)
        ### END SOLUTION

    def free_unused(self):
        """Frees what nobody needs now, also what is still on its way."""
        ### BEGIN SOLUTION
        for unit in self.units:
            if unit.users == 0 and (unit.whole or unit.gathering is not None):
                unit.free()
        ### END SOLUTION

    def publish(self):
        """The shards have been updated."""
        ### BEGIN SOLUTION
        # Nothing to send: the next forward fetches. Whatever was fetched before is old now.
        self.free_unused()
        ### END SOLUTION

    @contextlib.contextmanager
    def gathered(self):
        """Inside, the module's parameters are whole and current. All ranks call it."""
        ### BEGIN SOLUTION
        self.acquire(self.units)
        try:
            yield
        finally:
            self.release(self.units)
        ### END SOLUTION

    def states(self):
        yield from super().states()
        for unit in self.units:
            yield "weights", unit.own, self.pieces(unit, unit.mine)
            if unit.shard is None:
                yield "weights", unit.weights, self.pieces(unit)


# %% nbgrader={"grade": true, "grade_id": "check-Zero3", "locked": true, "points": 10, "schema_version": 3, "solution": false, "task": false}
check("08.Zero3", Zero3)

# %% [markdown]
# ## 6. What it holds, and what it sends
#
# A GPT with four blocks and 16-bit weights, a few steps, several N. Each rank measures what it holds between two steps,
# against what was there before the model was made. The padding is in the prediction: $\psi'$ is the sum of the units'
# sizes.


# %%
def part_of(step, passages=PASSAGES, length=LENGTH):
    """This rank's passages of a step's batch: every N-th one."""
    inputs, targets = batch(step, passages, length, SEED)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine].to(device()), targets[mine].to(device())


def train_once(engine, step, *size):
    engine.zero_grad()
    inputs, targets = part_of(step, *size)
    loss = loss_function(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    return loss.detach()


STEPS = 2


def held_now():
    """Live bytes, when the library's threads have let go of what they have sent."""
    readings = []
    for _ in range(5):
        time.sleep(0.02)
        readings.append(memory_so_far().at_end.live)
    return min(readings)


def bytes_at_rest(make_engine, dtype):
    """Bytes that this rank holds after some steps, and psi'."""
    part_of(0)  # the text is in memory from now on
    before = held_now()
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(DEEP).to(device(), dtype))
    for step in range(STEPS):
        train_once(engine, step)
    held = held_now() - before
    return held, sum(len(unit.weights) for unit in engine.buckets)


def sent_in_a_step(run, rank=0):
    """Bytes that a rank sends in a step by the engine's operations."""
    calls = [call for call in run.calls[rank] if call.op != "broadcast"]
    return round(sum(call.sent for call in calls) / STEPS)


three = {
    n: launch(bytes_at_rest, n, args=(Zero3, torch.bfloat16), device=DEVICE)
    for n in sorted({1, 2, 3, WORLD_SIZE})
}

# %%
# NBVAL_CHECK_OUTPUT
rows = []
for n, run in three.items():
    held, elements = run.results[0]
    weights = 2 * round(3 * elements * (n - 1) / n)  # 2 bytes an element
    rows.append(
        {
            "N": n,
            "psi'": elements,
            "16 psi'/N": 16 * elements // n,
            "held": held,
            "3 psi'(N-1)/N elements": weights,
            "one number": round(8 * 2 * (n - 1) / n),
            "sent": sent_in_a_step(run),
        }
    )
table(rows, equal=("16 psi'/N", "held"), title="bytes of rank 0: predicted and measured")

# %% [markdown]
# To the byte: held is $16\psi'/N$. Sent is $3\psi'(N-1)/N$ elements of 2 bytes, and an all-reduce of one float64, the
# norm with which all ranks decide alike about overflow and clipping.

# %%
units_sent.compare(
    sent_in_a_step(three[WORLD_SIZE])
    / (2 * three[WORLD_SIZE].results[0][1] * (WORLD_SIZE - 1) / WORLD_SIZE)
)

# %%
at_rest.compare(three[WORLD_SIZE].results[0][0])

# %% [markdown]
# ### And while it computes
#
# **Predict.** The most bytes of weights that a rank holds at any moment of a step. It has its own chunks of everything,
# the model's own unit (the positions), the layer at work, and the one that has been started ahead. The sizes of the
# units, in bytes, with the padding:


# %%
def padded(elements):
    return -(-elements // WORLD_SIZE) * WORLD_SIZE  # rounded up to N equal chunks


UNITS = [
    (type(layer).__name__, 2 * padded(sum(one.numel() for one in parameters)))
    for layer, parameters in parameters_by_layer(GPT(DEEP))
]
print(", ".join(f"{name} {size:,}" for name, size in UNITS))
most_weights = predict("most bytes of weights on a rank", unit="bytes", N=WORLD_SIZE)


# %%
def one_watched_step(make_engine):
    """The bytes of weights from change to change, in the second of two steps."""
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(DEEP).to(device(), torch.bfloat16))
    train_once(engine, 0)
    began = memory_so_far().at_end.time
    train_once(engine, 1)
    alive = [each.parameters for each in memory_so_far().samples if each.time >= began]
    changes = [alive[0], *(now for before, now in pairwise(alive) if now != before)]
    return changes, 2 * sum(len(unit.weights) for unit in engine.buckets)


run = launch(one_watched_step, WORLD_SIZE, args=(Zero3,), device=DEVICE)
alive, all_weights = run.results[0]
most_weights.compare(max(alive))

# %%
# NBVAL_CHECK_OUTPUT
(_, of_model), *of_layers = UNITS
pairs = max(one[1] + other[1] for one, other in pairwise(of_layers))
table(
    [
        {
            "own chunks": all_weights // WORLD_SIZE,
            "the model's own": of_model,
            "two neighbours": pairs,
            "predicted": all_weights // WORLD_SIZE + of_model + pairs,
            "measured": max(alive),
            "all weights": all_weights,
        }
    ],
    equal=("predicted", "measured"),
    title="most bytes of weights alive on rank 0",
)

# %%
curves(
    {
        "ZeRO-3": [each / 1e3 for each in alive],
        "all weights": [all_weights / 1e3] * len(alive),
    },
    xlabel="changes of what is alive, in one step",
    ylabel="kB of weights alive",
)

# %% [markdown]
# Forward is the left half, backward the right one (the axis counts changes, it is not time). Each tooth is a block that
# is fetched while its neighbour is still there; on both sides of the middle, where the curve is down at this rank's own
# chunks, are the two small layers at the end of the model. The deeper the model, the smaller the share of two layers:
# with 100 equal blocks, a fiftieth of all weights.
#
# ### Why not keep what has been gathered?
#
# A layer is gathered for its forward and again for its backward. Whoever keeps it in between saves one of the three
# units of communication. What does it cost?


# %%
class KeepsWhole(Zero3):
    """Gathers for forward, and frees after backward only."""

    def after_forward(self, one):
        pass  # the user stays

    def before_backward(self, one):
        pass  # it is whole already


def between(make_engine):
    """Whole weights between forward and backward, beside this rank's chunks; and psi'."""
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(DEEP).to(device(), torch.bfloat16))
    for step in range(STEPS):
        engine.zero_grad()
        inputs, targets = part_of(step)
        loss = loss_function(engine(inputs), targets)
        alive = memory_so_far().at_end.parameters
        engine.backward(loss)
        engine.step()
    elements = sum(len(unit.weights) for unit in engine.buckets)
    return alive / (2 * elements) - 1 / dist.get_world_size(), elements


# %% [markdown]
# **Predict.** `KeepsWhole`: how many units does it send, and how many whole copies of all weights are alive between
# forward and backward?

# %%
units_kept = predict("sent by KeepsWhole, in units of psi (N-1)/N elements")

# %%
copies_kept = predict("whole weights alive between forward and backward, in psi")

# %%
kept_run, freed_run = (
    launch(between, WORLD_SIZE, args=(make_engine,), device=DEVICE)
    for make_engine in (KeepsWhole, Zero3)
)


def units_of(run):
    return sent_in_a_step(run) / (2 * run.results[0][1] * (WORLD_SIZE - 1) / WORLD_SIZE)


units_kept.compare(units_of(kept_run))

# %%
copies_kept.compare(kept_run.results[0][0])

# %%
# NBVAL_CHECK_OUTPUT
table(
    [
        {
            "engine": name,
            "sent, in psi'(N-1)/N": f"{units_of(run):.2f}",
            "whole weights alive, in psi'": f"{run.results[0][0]:.2f}",
        }
        for name, run in (("KeepsWhole", kept_run), ("Zero3", freed_run))
    ]
)

# %% [markdown]
# It sends as little as ZeRO-2. And between forward and backward it holds all weights, as ZeRO-2 does, and this rank's
# chunks beside them, $2\psi'/N$ bytes more than ZeRO-2. That is the moment that counts: all activations are there as
# well. FSDP2 calls this choice `reshard_after_forward=False`. For the *last* layers it is nearly free, since their
# backward comes right after their forward.
#
# ## 7. Break it on purpose: fetched too early
#
# When backward is over the link is idle while the optimizer works. The first layers will be needed soon. Why not start
# to fetch them now?


# %%
class TooEarly(Zero3):
    """Starts to fetch the first units for the next forward when backward is over."""

    def backward(self, loss):
        super().backward(loss)
        for unit in self.units[:3]:
            unit.start(self.communicator)

    def publish(self):
        pass  # forgets that what is on its way has just become old


def losses_of(make_engine, steps):
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(SMALL).to(device()), lr=0.01)
    return [round(train_once(engine, step).item(), 4) for step in range(steps)]


early, right = (
    launch(losses_of, WORLD_SIZE, args=(make_engine, 4), device=DEVICE)
    for make_engine in (TooEarly, Zero3)
)
table(
    [
        {"step": step, "Zero3": good, "TooEarly": bad}
        for step, (good, bad) in enumerate(zip(right.results[0], early.results[0], strict=True))
    ],
    title="loss on rank 0",
)

# %% [markdown]
# No error. Step 0 is right. From step 1 on the first layers run *forward* with weights that are one step old. Backward
# gathers anew and gets the new ones, so the two halves of a step do not even agree. The loss still falls. No error and
# no glance at a loss curve finds such a mistake; comparing with one process, number by number, does.
#
# With your own `publish` nothing goes wrong: it frees what has been started, and the fetching was for nothing. To fetch
# before the forward is possible, but only *after* every owner has updated its chunk.
#
# ## 8. Fetch ahead: prefetch
#
# Section 6 counted bytes. When do they travel? For that we need lab 05's link, slow in a known way, and its blocks that
# take their time. `Zero3(..., prefetch=False)` gathers each layer when it is needed, and waits.


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


LINK = Link(latency=LATENCY, bandwidth=BANDWIDTH)
TIMED = 3  # steps; the first forward knows no order yet, so the first step is left out


def train_on_link(make_engine):
    torch.manual_seed(SEED + dist.get_rank())
    model = paced(GPT(DEEP).to(device()))
    engine = make_engine(model)
    with watch_layers(model):
        for step in range(TIMED):
            train_once(engine, step)


def time_line(name, make_engine):
    run = launch(train_on_link, WORLD_SIZE, args=(make_engine,), device=DEVICE, link=LINK)
    steps = [timeline_of(run, step=step, title=name) for step in range(1, TIMED)]
    # The quickest one: whatever else the machine does can only make a step slower.
    return min(steps, key=lambda one: one.seconds)


def seconds_of(op, layer_bytes):
    return theory.collective_time(op, layer_bytes, WORLD_SIZE, LATENCY, 1 / BANDWIDTH)


SIZES = [4 * sum(one.numel() for one in part) for _, part in parameters_by_layer(GPT(DEEP))]
GATHERS, SCATTERS = (
    [seconds_of(op, size) for size in SIZES] for op in ("all_gather", "reduce_scatter")
)
ONE = max(GATHERS)
print(f"gather a block:    {theory.format_seconds(ONE)}")
print(f"a block's forward: {theory.format_seconds(BLOCK / 2)}")
print(f"all on the link:   {theory.format_seconds(2 * sum(GATHERS) + sum(SCATTERS))} a step")

# %% [markdown]
# **Predict.** Without prefetch, which share of the communication is hidden behind computation? And with it? What can
# hide is what travels while a *block* computes, since the other layers are quick. While a block runs forward, the next
# one can be fetched. While it runs backward, so can the one before it, and the gradients of the one behind it can
# leave. (Predict for ranks that keep step. Where they share a few cores they do not, a collective begins when the last
# of them has come, and what you measure may be far below your prediction.)

# %%
hidden_without = predict("share hidden, without prefetch (0 to 1)")

# %%
hidden_with = predict("share hidden, with prefetch (0 to 1)", blocks=DEEP.layers)

# %%
lines = {
    "without prefetch": time_line("without prefetch", partial(Zero3, prefetch=False)),
    "with prefetch": time_line("with prefetch", Zero3),
}
hidden_without.compare(lines["without prefetch"].ranks[0].hidden_share)

# %%
hidden_with.compare(lines["with prefetch"].ranks[0].hidden_share)

# %%
compare(lines, rank=0)

# %%
# All gathers of blocks but the first, in forward and backward; all gradients but the last.
behind = 3 * (DEEP.layers - 1) * ONE
in_all = 2 * sum(GATHERS) + sum(SCATTERS)
print(f"of {theory.format_seconds(in_all)}, {theory.format_seconds(behind)} can hide")
print(f"about {behind / in_all:.0%}")

# %% [markdown]
# Without prefetch the lanes take turns. The reduction of gradients does run in the background, but the next layer's
# weights queue up behind it, and the layer waits for both. With prefetch they are asked for one layer *earlier*, so
# they stand before the gradients in the queue, and are there when the layer begins.
#
# Three things stay exposed: the first layers of the forward, the last layers at the turning point, where two short
# layers have nothing to hide the last block behind, and the gradients of the first layers at the end. In a model with
# 100 equal blocks that is a few per cent.
#
# One layer ahead costs one layer of memory. FSDP2 can go further, with more memory, when the link is late; and it
# limits how far a CPU may run ahead of its GPU (`limit_all_gathers` in the first FSDP), because each gathering that has
# been started holds memory.

# %% [markdown]
# ## 9. Who holds what, layer by layer
#
# `watch_states` takes a snapshot of what this rank holds at each event of a step, and `shard_map` makes a map of them.
# Columns are the parameters, drawn to scale. A colour is an owner: the rank that holds the optimizer state of these
# elements. What a rank holds and does not own keeps its owner's colour, so whatever is redundant is seen as foreign
# colours. Step through it with the arrow keys. Look at the row of weights: a layer's stripe fills with the colours of
# all ranks and is bare again when its neighbour fills; so it goes to the head, and back. What is hatched is on its way.


# %%
def watched(make_engine):
    """A watched step in bfloat16. The one before it has shown the order of the layers."""
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(SMALL).to(device(), torch.bfloat16))
    train_once(engine, 0)
    with watch_states(engine):
        train_once(engine, 1)


def map_of(title, make_engine):
    run = launch(watched, WORLD_SIZE, args=(make_engine,), device=DEVICE)
    return shard_map(run, strategy="zero3", title=title)


yours = map_of("your ZeRO-3", Zero3)

# %% tags=["picture"]
show(yours)


# %% [markdown]
# And here is an engine that is called ZeRO-3 as well. It gathers all layers when the forward begins, and lets go of
# them when backward is over. At rest it holds $16\psi/N$, and it sends less than yours. Look at its weights, and at the
# bar of live bytes.


# %%
class AllAtOnce(Zero3):
    """Holds nothing between two steps, and everything within one."""

    def forward(self, *inputs):
        self.acquire(self.units)
        return super().forward(*inputs)

    def backward(self, loss):
        super().backward(loss)
        self.release(self.units)


theirs = map_of("all at once", AllAtOnce)
show(theirs)

# %%
table(
    [
        {
            "engine": name,
            "most bytes of model states": max(one.most(rank) for rank in range(WORLD_SIZE)),
            "by the formula, at rest": round(one.formula),
        }
        for name, one in (("your ZeRO-3", yours), ("all at once", theirs))
    ],
    title="on the rank that holds most, at one of the events",
)

# %% [markdown]
# This model has only two blocks, so two layers are most of it. Section 6 told what counts in deep models.
#
# ## 10. The same numbers as one process, and as FSDP2
#
# torch's own ZeRO-3 is called FSDP2. `fully_shard(module)` makes a unit of a module: it replaces the parameters by
# sharded ones (`DTensor`, cut along the rows), and hooks gather and free them. Here both train the same GPT in float32,
# beside one process with the whole batch.

# %%
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


class Fsdp2:
    """torch's fully_shard in the shape of this lab."""

    def __init__(self, model, **options):
        from torch.distributed.fsdp import fully_shard

        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, src=0)
        self.module = model
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), **options)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def gathered(self):
        yield

    def whole(self):
        return [parameter.full_tensor() for parameter in self.module.parameters()]


def weights_of(engine):
    with engine.gathered():
        whole = engine.whole() if isinstance(engine, Fsdp2) else engine.module.parameters()
        return torch.cat([weight.detach().flatten().cpu() for weight in whole])


def three_steps(make_engine):
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(SMALL).to(device()), **OPTIONS)
    for step in range(3):
        train_once(engine, step)
    return weights_of(engine)


alone, your_weights, their_weights = (
    launch(three_steps, n, args=(make_engine,), device=DEVICE).results[0]
    for n, make_engine in ((1, Zero3), (WORLD_SIZE, Zero3), (WORLD_SIZE, Fsdp2))
)
for name, one, other in (
    ("your ZeRO-3, and one process", your_weights, alone),
    ("FSDP2, and one process      ", their_weights, alone),
    ("your ZeRO-3, and FSDP2      ", your_weights, their_weights),
):
    far = (one - other).abs()
    print(f"{name}: largest difference {far.max():.0e}, on average {far.mean():.0e}")
size = alone.abs()
spacing = torch.nextafter(size, size + 1) - size
print(
    f"between two neighbouring float32 numbers, at a weight, on average: {spacing.mean():.0e}"
)

# %% [markdown]
# On average they differ by about as much as two neighbouring float32 numbers do. But the largest difference is far
# larger. Where are the differences large? `queries_keys_values.bias` is three biases, so we look at its thirds one by
# one. And for each place we look at the gradient of the first step, computed here.


# %%
def names_of(model):
    """The name of each element, in the order of the flat weights."""
    for name, weight in model.named_parameters():
        if name.endswith("queries_keys_values.bias"):
            for third in ("queries", "keys", "values"):
                yield from [f"{name}, {third}"] * (weight.numel() // 3)
        else:
            yield from [name] * weight.numel()


torch.manual_seed(SEED)
model = GPT(SMALL)
inputs, targets = batch(0, PASSAGES, LENGTH, SEED)
loss_function(model(inputs), targets).backward()
gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()]).abs()
names = list(names_of(model))
far = (your_weights - alone).abs()
largest = far.topk(100).indices
keys = torch.tensor([name.endswith("keys") for name in names])
count = Counter("keys' bias" if keys[place] else "elsewhere" for place in largest.tolist())
print("of the 100 largest:", ", ".join(f"{count[where]} {where}" for where in sorted(count)))
print(f"keys' bias: {keys.sum()} elements, gradients around {gradient[keys].median():.0e}")
print(f"all others: gradients around {gradient[~keys].median():.0e}")
print("the largest differences elsewhere:")
for place in far.masked_fill(keys, 0).topk(3).indices.tolist():
    print(f"  {far[place]:.0e}, first gradient {gradient[place]:.0e}, {names[place]}")

# %% [markdown]
# In its first step Adam moves a weight by lr times $g/(|g|+\epsilon)$, with $\epsilon$ = 1e-8. Where the gradient is
# much larger than $\epsilon$ that is plus or minus lr, and a rounding error in $g$ changes nothing. Where the gradient
# is *not* much larger, an error $\delta$ moves the weight by lr times $\delta\epsilon/(|g|+\epsilon)^2$, that is by up
# to $10^5\,\delta$ here. So the places to look for are those with a gradient near $\epsilon$ or below. A few are so by
# chance.
#
# The bias of the keys is so by design. It adds the same number to all scores of a query, and a softmax does not change
# when all its inputs grow alike: the true gradient is **zero**, what is computed is rounding alone, and nothing in the
# model depends on this bias. $\epsilon$ keeps it from moving far: lr times 2e-12 / 1e-8 is 2e-7 in a step, where other
# weights move by 1e-3. But all of that is noise, and as soon as two runs differ in a last bit, each has its own. So
# when you compare two runs weight by weight, know where noise is to be expected, or look at the loss.
#
# ## 11. Four engines, one curve
#
# The summit's proof. DDP with torch's AdamW, and your three engines, over LOSS_STEPS steps in float32. And a second
# DDP, which differs from the first in one thing: its all-reduce is your ring, which adds up the ranks' gradients in
# another order.

# %%
ddp = reuse("05_ddp_overlap")
ring_all_reduce = reuse("04_ring_all_reduce").ring_all_reduce


class Ddp:
    """Lab 05's DDP with torch's AdamW, in the shape of this lab."""

    def __init__(self, model, on_rings=False, **options):
        ring = ddp.InBackground(ring_all_reduce) if on_rings else None
        self.ddp, self.module = ddp.DistributedDataParallel(model, all_reduce=ring), model
        self.optimizer = torch.optim.AdamW(model.parameters(), **options)

    def __call__(self, *inputs):
        return self.ddp(*inputs)

    def backward(self, loss):
        self.ddp.backward(loss)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def gathered(self):
        yield


EVERY = 10  # steps between two looks at the weights


def train_long(make_engine, steps):
    """This rank's losses, and rank 0's weights after some of the steps."""
    torch.manual_seed(SEED + dist.get_rank())
    engine = make_engine(GPT(SMALL).to(device()), **OPTIONS)
    losses, weights = [], []
    for step in range(steps):
        losses.append(train_once(engine, step, 12, 16))  # 12 passages of 16 characters
        if step % EVERY == 0:
            now = weights_of(engine)
            weights += [now] if dist.get_rank() == 0 else []
    return torch.stack(losses).double().cpu(), weights


losses, weights = {}, {}
for name, make_engine in {
    "DDP": Ddp,
    "ZeRO-1": reuse("06_zero1").Zero1,
    "ZeRO-2": Zero2,
    "ZeRO-3": Zero3,
    "DDP on rings": partial(Ddp, on_rings=True),
}.items():
    arguments = (make_engine, LOSS_STEPS)
    run = launch(train_long, WORLD_SIZE, args=arguments, device=DEVICE, meter=False)
    losses[name] = (sum(one for one, _ in run.results) / WORLD_SIZE).tolist()
    weights[name] = run.results[0][1]

# %%
curves({name: losses[name] for name in list(losses)[:4]}, ylabel="loss")


# %% [markdown]
# One curve. Now the differences from DDP: of the weights on average, on a logarithmic axis.


# %%
def distance(name):
    pairs = zip(weights[name], weights["DDP"], strict=True)
    return [(one - other).abs().mean().item() for one, other in pairs]


def largest_of_losses(name):
    return max(abs(a - b) for a, b in zip(losses[name], losses["DDP"], strict=True))


distances = {name: distance(name) for name in losses if name != "DDP"}
curves(
    distances,
    xlabel=f"step / {EVERY}",
    ylabel="difference from DDP",
    title="a weight, on average",
    log=True,
    floor=1e-12,
)

# %%
table(
    [
        {
            "engine": name,
            "weights, first look": f"{distances[name][0]:.0e}",
            "weights, last look": f"{distances[name][-1]:.0e}",
            "loss, largest": f"{largest_of_losses(name):.0e}",
        }
        for name in distances
    ],
    title="differences from DDP",
)

# %% [markdown]
# With four ranks the last row is the measure for the others: two runs of the *same* DDP, whose sums are only added up
# in another order. $(a+b)+c$ and $a+(b+c)$ differ in the last bit. In a reduction the sum of each chunk begins at
# another rank, and ZeRO-3 cuts its chunks elsewhere, layer by layer. So it parts from DDP as far as DDP from itself.
# Each step starts from weights that differ a little, so the differences grow. Nobody has made a mistake; but nobody
# should compare long runs bit by bit, either. The loss, which is what one trains for, stays the same to six digits.
#
# And ZeRO-1 and ZeRO-2? With the default bucket of 25 MiB all gradients of this small model are one bucket, as with
# DDP, cut in the same places, and added up by the same library. At N = 4 even the division is exact. So they do not
# differ from DDP by a single bit: AdamW works on each element by itself, and does not care who owns it.
#
# Try other N. With two ranks nothing differs at all, because $a+b$ is $b+a$. With three all your engines part from DDP,
# whatever the order: they divide the *loss* by N and lab 05's DDP divides the gradients, and a third cannot be written
# down exactly.
#
# ## 12. The ledger
#
# The same small GPT as in the other labs, in float16. The formula has $\psi$, what is held and sent has $\psi'$: where
# N does not divide a layer, the padding is in the measurement alone.


# %%
def train_in_halves(steps):
    """Bytes that this rank holds between two steps."""
    part_of(0)
    before = held_now()
    torch.manual_seed(SEED + dist.get_rank())
    engine = Zero3(GPT(SMALL).to(device(), torch.float16))
    for step in range(steps):
        train_once(engine, step)
    return held_now() - before


psi = GPT(SMALL).parameter_count
run = launch(train_in_halves, WORLD_SIZE, args=(STEPS,), device=DEVICE)
operations = ("reduce_scatter", "all_gather", "all_reduce")
busiest = max(range(WORLD_SIZE), key=lambda rank: sent_in_a_step(run, rank))
record(
    LedgerRow(
        lab="08",
        strategy="ZeRO-3",
        world_size=WORLD_SIZE,
        held=max(run.results),
        held_formula=theory.model_state_bytes("zero3", psi, WORLD_SIZE),
        sent=sent_in_a_step(run, busiest),
        sent_formula=2 * theory.step_volume("zero3", psi, WORLD_SIZE).sent,
        messages=sum(run.traffic[0].by_operation[op].calls for op in operations) // STEPS,
        limited_by="1.5 times the bytes; a layer must fit",
    )
)

# %% [markdown]
# From 16$\psi$ to 16$\psi$/N, for half as many bytes again on the wire, and for a call per layer instead of one per
# bucket. What is left that does not shrink with N, at the same number of passages a rank, are the activations, and the
# whole weights and gradients of a few layers.
#
# ## 13. What production systems do differently
#
# - **FSDP2** (`fully_shard`) shards each parameter by itself, along its rows, where you lay a layer's parameters end to
#   end. That makes a parameter a thing of its own that can be saved, frozen or cast alone. For the collective they are
#   copied into one flat buffer and out again. The first FSDP had flat units as you have, and called them
#   `FlatParameter` (Zhao et al. 2023, section 3.2). Who is a unit is the user's choice: each call of `fully_shard`
#   makes one.
# - `reshard_after_forward=False` keeps a unit whole until backward, as `KeepsWhole`. An integer keeps it whole within a
#   node only. By default FSDP2 does not free its root module between forward and backward.
# - **Prefetch.** FSDP2 gathers on a stream of its own, so the CPU issues the next gather while the GPU computes.
#   `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` name what comes next; without them backward
#   goes by the reverse of the order seen in forward, as you do. In the first FSDP `limit_all_gathers=True` let at most
#   two gatherings be under way, since each takes memory (section 3.4).
# - **DeepSpeed, stage 3**, traces which parameters are used in which order, and looks ahead by *elements*:
#   `stage3_prefetch_bucket_size`. `stage3_max_live_parameters` bounds what is whole at a time, and
#   `stage3_max_reuse_distance` keeps what will be used again soon. Parameters smaller than
#   `stage3_param_persistence_threshold` are never sharded: a bias costs a message and saves nothing.
# - **Hybrid sharding** shards within a node, where links are fast, and replicates across nodes: gathers stay inside,
#   and only the sums of gradients go out (HSDP; ZeRO++'s hpZ is a relative). Lab 10 goes there.
# - **The model is too large to be made.** You shard a model that was whole on every rank once. Production code makes it
#   on the *meta* device, shapes without memory, and fills each unit after it has been sharded.
#
# ## 14. Questions
#
# Answer in a sentence or two, then compare with the solution.
#
# **Q1.** Why is the third unit of communication not $\psi(N-1)/N$ for the gathering of new weights after the step, as
# in ZeRO-1 and ZeRO-2?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-third", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# Nobody needs new weights after the step except the next forward, and that gathers anyway. ZeRO-2's gathering after the
# step *is* ZeRO-3's gathering for the forward, only layer by layer and later. The additional one is that for backward.

# %% [markdown]
# **Q2.** A model has 100 equal layers, 10 billion parameters, 16-bit weights, on 64 ranks. How many bytes does a rank
# hold at rest? How many bytes of whole weights come on top while it computes, with prefetch? And if the whole model
# were one unit?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-units", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 16 x 10e9 / 64 = 2.5 GB at rest. Two layers of 100 million parameters, 0.4 GB. As one unit 20 GB: every rank holds all
# weights whenever it computes, and only gradients and optimizer state are split.

# %% [markdown]
# **Q3.** With gradient accumulation over k micro-steps, how many units of $\psi(N-1)/N$ does an optimizer step of your
# engine send? And DDP with `no_sync`? What could be done about it?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-accumulation", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# 3k: each micro-step gathers twice and reduces once. DDP sends 2, whatever k is. One could keep gradients whole until
# the last micro-step, 2k + 1 units, for 2$\psi$ bytes more; and keep the weights whole through all micro-steps, 2
# units, for another 2$\psi$. Then it is ZeRO-1. Memory is what the bytes buy.

# %% [markdown]
# **Q4.** A layer keeps a second output in an attribute, `self.penalty`, and the loss adds it up. Its gradient does not
# pass the layer's output. What happens in your engine's backward, and what would you tell the author?

# %% [markdown] nbgrader={"grade": true, "grade_id": "question-attribute", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false}
# The backward of the penalty begins before the gradient of the output is there, so nobody has gathered the layer. The
# graph reads a storage without memory: an error if you are lucky, the end of the process if not. The author should
# return the penalty as an output: all outputs are watched, and the first gradient that arrives gathers the layer.

# %% [markdown]
# ## Sources
#
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   SC 2020, arXiv 1910.02054: section 5.3 (parameters), section 7.2.2 (communication: 3$\psi$, 1.5 times), figure 1.
# - Y. Zhao et al.: *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023, arXiv 2304.11277:
#   sections 3.2 (units and sharding strategies), 3.3 (overlap and prefetch), 3.4 (memory, the rate limiter).
# - PyTorch documentation: `torch.distributed.fsdp.fully_shard`; `torch.Tensor.register_hook`;
#   `torch.nn.Module.register_forward_pre_hook`; the note *Autograd mechanics* on saved tensors.
# - DeepSpeed documentation: *DeepSpeed configuration JSON*, ZeRO optimizations (stage3_prefetch_bucket_size,
#   stage3_param_persistence_threshold, stage3_max_live_parameters).
# - G. Wang et al.: *ZeRO++: Extremely Efficient Collective Communication for Giant Model Training*, 2023, arXiv
#   2306.10209.

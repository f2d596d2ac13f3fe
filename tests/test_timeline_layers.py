"""watch_layers in real ranks: it sees each layer's forward and backward, and changes nothing."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.model import GPT, SMALL, Size, loss_function
from shardlab.records import Link
from shardlab.runtime import launch
from shardlab.text import batch
from shardlab.timeline import span, timeline_of, watch_layers

LINK = Link(latency=0.002, bandwidth=1e8)
LAYERS = ["embedding", "blocks.0", "blocks.1", "norm", "head"]


def run(fn, world_size=1, **options):
    return launch(fn, world_size, device="cpu", timeout=60, **options)


def spans_of(record, rank=0):
    return [(item.kind, item.label) for item in record.spans[rank] if item.kind != "waiting"]


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(_, x, seconds):
        Slow.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        time.sleep(Slow.seconds)
        return gradient, None


class SlowLinear(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x), 0.02)


# What is seen


def test_every_layer_of_the_gpt_forward_and_backward():
    def train():
        torch.manual_seed(0)
        model = GPT(SMALL)
        inputs, targets = batch(0, 4, 32)
        with watch_layers(model):
            for _ in range(2):
                loss_function(model(inputs), targets).backward()
        names = [name for name, _ in model.named_parameters()]
        loss_function(model(inputs), targets).backward()  # unseen
        return names

    record = run(train)
    step = [("forward", name) for name in LAYERS] + [("backward", name) for name in reversed(LAYERS)]
    assert spans_of(record) == step * 2
    spans = [item for item in record.spans[0] if item.kind != "waiting"]
    assert all(item.ended >= item.began for item in spans)
    assert all(later.began >= item.ended for item, later in zip(spans, spans[1:], strict=False))
    # Every gradient becomes ready in the backward of its own layer, the embedding's too.
    gradients = record.gradients[0][: len(record.results[0])]
    assert sorted(item.parameter for item in gradients) == sorted(record.results[0])
    backward = {item.label: item for item in spans[:10] if item.kind == "backward"}
    for item in gradients:
        layer = next((name for name in LAYERS if item.parameter.startswith(f"{name}.")), None)
        if layer is None:
            assert item.parameter == "positions"
            # It belongs to no layer: the first block's backward has ended, the embedding's has not begun.
            assert backward["blocks.0"].ended < item.ready < backward["embedding"].began
        else:
            assert backward[layer].began <= item.ready <= backward[layer].ended, item.parameter


@pytest.mark.parametrize("way", ["plain", "reentrant", "not reentrant", "tied", "frozen"])
def test_values_are_the_same_to_the_last_bit(way):
    def train(way):
        class Checkpointed(GPT):
            def forward(self, tokens):
                hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
                for block in self.blocks:
                    hidden = checkpoint(block, hidden, use_reentrant=way == "reentrant")
                return self.head(self.norm(hidden))

        results = []
        for watched in (False, True):
            torch.manual_seed(0)
            model = (Checkpointed if "reentrant" in way else GPT)(Size(tied=way == "tied"))
            model.embedding.requires_grad_(way != "frozen")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with watch_layers(model) if watched else span("nothing"):
                for step in range(2):
                    inputs, targets = batch(step, 4, 32)
                    optimizer.zero_grad()
                    loss_function(model(inputs), targets).backward()
                    optimizer.step()
            results.append([(p.detach().clone(), p.grad) for p in model.parameters()])
        for (plain, plain_grad), (watched, grad) in zip(*results, strict=True):
            assert torch.equal(plain, watched)
            assert grad is plain_grad is None or torch.equal(plain_grad, grad)

    record = run(train, args=(way,))
    kinds = spans_of(record)
    again = [label for kind, label in kinds if kind == "recompute"]
    assert again == (["blocks.1", "blocks.0"] * 2 if "reentrant" in way else [])
    for name in LAYERS:
        assert kinds.count(("forward", name)) == 2
        assert kinds.count(("backward", name)) == (0 if (way, name) == ("frozen", "embedding") else 2)
    if way == "not reentrant":  # the forward is repeated within the backward of the layer
        levels = {item.kind: item.level for item in timeline_of(record).ranks[0].compute if item.label == "blocks.0"}
        assert levels == {"forward": 0, "backward": 0, "recompute": 1}


def test_a_module_called_twice_has_two_spans_each_way():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.shared(torch.relu(self.shared(self.first(x))))

    def train():
        model = Twice()
        with watch_layers(model):
            model(torch.ones(2, 8)).sum().backward()

    assert spans_of(run(train)) == [
        ("forward", "first"),
        ("forward", "shared"),
        ("forward", "shared"),
        ("backward", "shared"),
        ("backward", "shared"),
        ("backward", "first"),
    ]


def test_a_backward_after_the_watch_is_not_seen():
    def train():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        with watch_layers(model):
            loss = model(torch.ones(2, 4)).sum()
        loss.backward()

    record = run(train)
    assert spans_of(record) == [("forward", "0"), ("forward", "1")]
    assert record.gradients == [[]]


def test_in_place_operations_and_layers_that_do_nothing_are_left_alone():
    """torch's own full backward hooks fail at the first of them."""

    def train():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0), nn.Linear(4, 1))
        model[3].eval()  # hands on its input, as Identity does
        with watch_layers(model):
            hidden = model[0](torch.ones(2, 4))
            hidden.mul_(2)
            model(torch.ones(2, 4)).sum().backward()
            hidden.sum().backward()

    backward = [label for kind, label in spans_of(run(train)) if kind == "backward"]
    assert backward == ["4", "1", "0", "0"]


def test_an_exception_ends_what_was_open():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    def train():
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Failing()), nn.Linear(4, 4))
        with watch_layers(model):
            for _ in range(2):
                try:
                    model(torch.ones(2, 4))
                except ValueError:
                    continue
        with span("after"):
            pass
        return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules()]

    record = run(train)
    assert spans_of(record) == [("forward", "0"), ("forward", "1.0")] * 2 + [("other", "after")]
    assert set(record.results[0]) == {0}


def test_wrappers_are_looked_through_and_a_single_layer_is_one():
    def train():
        ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with watch_layers(ddp):
            ddp(torch.ones(2, 4)).sum().backward()
        with watch_layers(nn.Linear(4, 4)) as _:
            pass
        single = nn.Linear(4, 4)
        with watch_layers(single):
            single(torch.ones(2, 4)).sum().backward()

    assert [label for _, label in spans_of(run(train))] == ["0", "1", "1", "0", "Linear", "Linear"]


def test_fifty_steps_leave_no_hook_and_no_tensor_behind():
    def train():
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        live = []
        with watch_layers(model):
            for _ in range(50):
                model.zero_grad()
                model(torch.ones(2, 16)).sum().backward()
                live.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
        return live, [len(p._backward_hooks or ()) for p in model.parameters()]

    live, hooks = run(train).results[0]
    assert live[-1] <= live[2]
    assert set(hooks) == {0}


def test_outside_a_launch_nothing_is_recorded():
    model = nn.Linear(2, 2)
    with watch_layers(model), span("optimizer"):
        assert not model._forward_hooks and not model._backward_hooks
        model(torch.ones(1, 2)).sum().backward()

    def train():
        with watch_layers(nn.Linear(2, 2)), span("optimizer"):
            return True

    assert run(train, meter=False).results == [True]


# What overlaps


def train_with(how):
    """Four slow layers on each of two ranks, whose gradients are averaged as soon as they are there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(SlowLinear(20, 20, bias=False) for _ in range(4)))
    handles = []

    def ring(tensor):
        thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
        thread.start()
        return thread

    def hook(parameter):
        if how == "blocking":
            dist.all_reduce(parameter.grad)
        elif how == "future":
            dist.all_reduce(parameter.grad, async_op=True).get_future().then(lambda done: done.value()).wait()
        elif how == "thread":
            ring(parameter.grad).join()
        else:
            handles.append(dist.all_reduce(parameter.grad, async_op=True))

    if how == "torch":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    with watch_layers(model):
        for _ in range(2):
            dist.barrier()
            model(torch.ones(2, 20)).sum().backward()
            for handle in handles:
                handle.wait()
            handles.clear()


@pytest.mark.parametrize("how", ["blocking", "future", "thread"])
def test_what_blocks_hides_nothing(how):
    timeline = timeline_of(run(train_with, 2, args=(how,), link=LINK), step=1)
    assert timeline.hidden_share < 0.02
    for rank in timeline.ranks:
        backward = [item for item in rank.compute if item.kind == "backward"]
        assert [item.buckets for item in backward] == [(0,), (1,), (2,), (3,)]
        for item, layer in zip(rank.communication, backward, strict=True):
            assert layer.began <= item.issued and item.ended <= layer.ended, "it lies within the layer's span"


@pytest.mark.parametrize("how", ["asynchronous", "torch"])
def test_what_goes_on_meanwhile_is_hidden(how):
    timeline = timeline_of(run(train_with, 2, args=(how,), link=LINK), step=1)
    assert timeline.clock == "link"
    # The rank that is last has three more layers (20 ms each) to hide three reductions of 4 ms under.
    assert timeline.slowest.hidden_share > 0.25  # what blocks has 0
    for rank in timeline.ranks:
        assert rank.overlapping == len(rank.communication) - 1
        assert [item.bucket for item in rank.communication] == [0, 1, 2, 3]
        assert rank.waiting[-1][1] >= rank.communication[-1].ended - 0.005, "the wait for the last one is seen"


def test_a_step_without_a_link_is_drawn_from_the_calls():
    timeline = timeline_of(run(train_with, 2, args=("asynchronous",)), step=0)
    assert timeline.clock == "calls"
    assert all(item.ended >= item.began == item.issued for item in timeline.ranks[0].communication)

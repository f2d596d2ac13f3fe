"""watch_states in real ranks, on engines made by hand: what is held, in which frame, by whom."""

from __future__ import annotations

import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlab.communicator import Library, mine_of
from shardlab.errors import LaunchError
from shardlab.meters import mark
from shardlab.pieces import Piece
from shardlab.runtime import launch
from shardlab.shard_map import shard_map, watch_states
from shardlab.theory import FP32_ADAM
from shardlab.timeline import span, watch_layers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or every rank would import pytest

FIRST, SECOND = (0, 4), (4, 10)  # the elements of the two parameters
WHOLE = ((0, 10),)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False))


class Owner:
    """A hand-made ZeRO-2: parameter i, its gradient and moment belong to rank i. No step, which tests call none of."""

    def __init__(self, frees=True):
        self.module, self.frees = model_of(), frees
        self.parameters = list(self.module.parameters())
        self.on_way = []
        self.kept = []
        self.moment = torch.zeros_like(self.parameters[dist.get_rank()])
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))

    def arrived(self, number):
        self.land()
        self.on_way.append((number, dist.reduce(self.parameters[number].grad, number, async_op=True)))

    def land(self):
        for number, work in self.on_way:
            work.wait()
            if number != dist.get_rank():
                self.kept += [] if self.frees else [self.parameters[number].grad]
                self.parameters[number].grad = None
        self.on_way = []

    def backward(self, loss):
        loss.backward()
        self.land()

    def states(self):
        number = dist.get_rank()
        yield "first_moment", self.moment, [Piece(number, 0, self.parameters[number].numel())]


def events(record):
    return [(f"{'/' if frame.ends else ''}{frame.kind} {frame.label}").strip() for frame in record.frames]


def held(record, kind, rank=0):
    return [frame.ranks[rank].held.get(kind, ()) for frame in record.frames]


def flying(record, kind, rank=0):
    return [frame.ranks[rank].flying.get(kind, ()) for frame in record.frames]


def own_step(frees):
    engine = Owner(frees)
    with watch_states(engine):
        engine.backward(engine.module(torch.ones(1, 2)).sum())


def test_a_gradient_is_reduced_to_its_owner_and_freed():
    record = shard_map(launch(own_step, 2, (True,), device="cpu"), "zero2", state=FP32_ADAM)
    assert events(record) == [
        "start",
        "forward 0",
        "forward 1",
        "backward 1",
        "call reduce of 24 B",
        "gradient 1.weight",
        "backward 0",
        "waiting reduce",
        "call reduce of 16 B",
        "gradient 0.weight",  # the wait that follows shows nothing new, so it is no event of the replay
        "end",
    ]
    assert record.owners == ((0, 4, 0), (4, 10, 1))
    for rank, own in enumerate((FIRST, SECOND)):
        assert held(record, "weights", rank) == [WHOLE] * 11
        assert held(record, "first_moment", rank) == [(own,)] * 11
        assert record.left_over(rank) == {}
    # The second parameter's gradient comes first. Rank 1 owns it; rank 0 lets go of it before it sends the next.
    assert held(record, "gradients", 0) == [()] * 4 + [(SECOND,)] * 3 + [WHOLE] + [(FIRST,)] * 3
    assert held(record, "gradients", 1) == [()] * 4 + [(SECOND,)] * 3 + [WHOLE] * 3 + [(SECOND,)]
    for rank in (0, 1):
        assert flying(record, "gradients", rank) == [()] * 4 + [(SECOND,)] * 4 + [(FIRST,)] * 2 + [()]
        assert flying(record, "weights", rank) == [()] * 11
    assert record.frames[-1].ranks[0].state_bytes == 4 * (10 + 4 + 4)
    assert record.formula == 4 * 10 + (4 + 8) * 10 / 2


def test_a_gradient_that_is_kept_stays_on_the_map_though_nobody_tells_of_it():
    record = shard_map(launch(own_step, 2, (False,), device="cpu"), "zero2")
    assert held(record, "gradients", 0)[-1] == held(record, "gradients", 1)[-1] == WHOLE
    assert record.left_over(0) == {"gradients": (SECOND,)} and record.left_over(1) == {"gradients": (FIRST,)}
    assert record.frames[-1].ranks[0].state_bytes == 4 * (10 + 10 + 4)


def plain_step():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch_states(model, optimizer), watch_layers(model):  # which is open already: spans are there once
        model(torch.ones(1, 2)).sum().backward()
        mark("the gradients are averaged")
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with span("optimizer"):
            optimizer.step()
    with watch_states({"engine": [model], "optimizer": optimizer}):
        optimizer.zero_grad()


def test_plain_data_parallel_holds_everything_everywhere():
    run = launch(plain_step, 2, device="cpu")
    record = shard_map(run, "zero1", watch=0)
    assert events(record) == [
        *("start", "forward 0", "forward 1", "backward 1", "gradient 1.weight", "backward 0", "gradient 0.weight"),
        *("mark the gradients are averaged", "call all-reduce of 16 B", "call all-reduce of 24 B"),
        *("other optimizer", "/other optimizer", "end"),
    ]
    assert held(record, "gradients") == [()] * 4 + [(SECOND,)] * 2 + [WHOLE] * 7
    assert held(record, "first_moment") == held(record, "second_moment") == [()] * 11 + [WHOLE] * 2
    assert record.owners == ((0, 10, None),)
    assert record.left_over(0) == record.left_over(1) == {"first_moment": WHOLE, "second_moment": WHOLE}
    assert "master" not in record.kinds
    assert [item.label for item in run.spans[0] if item.kind == "forward"] == ["0", "1"]
    after = shard_map(run, "ddp")
    assert events(after) == ["start", "end"]
    assert held(after, "gradients") == [WHOLE, ()] and held(after, "first_moment") == [WHOLE] * 2


class ByHand:
    """Keeps its states as torch's optimizers do, under the course's names."""

    def __init__(self, parameters):
        self.state = {each: {"master": each.detach().clone(), "first_moment": None, "step": 0} for each in parameters}


def by_hand_step():
    engine = nn.Module()
    engine.module = model_of()
    engine.optimizer = ByHand([engine.module[1].weight])
    with watch_states(engine):
        mark("nothing happens")


def test_an_optimizer_by_hand_is_one_when_it_keeps_its_states_as_torch_does():
    record = shard_map(launch(by_hand_step, 1, device="cpu"), "ddp")
    assert held(record, "master") == [(SECOND,)] * 3 and record.kinds == ("weights", "master")


class Units:
    """Weights in one flat storage that is freed and made again, with views of it left behind."""

    def __init__(self):
        self.module = nn.Module()
        self.flat = torch.arange(10.0)
        self.module.a = nn.Parameter(self.flat[:4])
        self.module.b = nn.Parameter(self.flat[4:])
        self.own = self.flat[5 * dist.get_rank() : 5 * dist.get_rank() + 5].clone()

    def states(self):
        rank = dist.get_rank()
        yield "weights", self.flat, [Piece(0, 0, 4), Piece(1, 0, 6)]
        yield "master", self.own, [[(0, 0, 4), (1, 0, 1)], [(1, 1, 6)]][rank]


def freed_step():
    engine = Units()
    storage = engine.flat.untyped_storage()
    with watch_states(engine):
        storage.resize_(0)
        mark("freed")
        storage.resize_(40)
        mine_of(engine.flat).copy_(engine.own)
        work = Library().all_gather(engine.flat)
        mark("gathering")
        work.wait()
        mark("gathered")
        swapped = engine.module.a.data
        engine.module.a.data = torch.empty(0)
        engine.module.b.data = torch.empty(0)
        storage.resize_(0)
        mark("freed, as it should be")
        engine.module.a.data, engine.flat = torch.ones(2, 2), torch.empty(0)
        del swapped


def test_alive_is_what_has_its_bytes_whatever_views_remain():
    record = shard_map(launch(freed_step, 2, device="cpu"), "zero3")
    assert [frame.label for frame in record.frames if frame.kind == "mark"] == [
        *("freed", "gathering", "gathered", "freed, as it should be")
    ]
    marks = [frame for frame in record.frames if frame.kind in ("mark", "start", "end")]
    assert [frame.ranks[0].held.get("weights", ()) for frame in marks] == [WHOLE, (), WHOLE, WHOLE, (), (FIRST,)]
    assert [frame.ranks[1].flying.get("weights", ()) for frame in marks] == [(), (), WHOLE, (), (), ()]
    assert record.owners == ((0, 5, 0), (5, 10, 1))
    assert record.left_over(1) == {"weights": (FIRST,)} and record.left_over(0) == {}


class Threaded(Units):
    """A ring of two in a thread of its own sends one half of the flat weights and receives the other."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def exchange(self):
        rank, halves = dist.get_rank(), self.flat.chunk(2)
        self.go.wait()
        for _ in range(2):  # twice the same: two operations
            works = [dist.isend(halves[rank], 1 - rank), dist.irecv(halves[1 - rank], 1 - rank)]
            for work in works:
                work.wait()


def threaded_step():
    engine = Threaded()
    thread = threading.Thread(target=engine.exchange)
    with watch_states(engine):
        thread.start()
        mark("not yet")
        engine.go.set()
        thread.join()
    return len(engine.module.a)


def test_messages_of_another_thread_are_in_flight_and_nothing_more():
    run = launch(threaded_step, 2, device="cpu")
    record = shard_map(run, "zero1")
    assert not any(frame.kind == "call" for frame in record.frames)
    waits = [frame for frame in record.frames if frame.kind == "waiting" and not frame.ends]
    assert any(frame.ranks[0].flying == {"weights": WHOLE} for frame in waits)
    assert record.frames[-1].ranks[0].flying == {}
    before = next(frame for frame in record.frames if frame.label == "not yet")
    assert before.ranks[0].flying == {}
    flights = run.states[0][0].flights
    assert [flight.kind for flight in flights] == ["weights", "weights"]
    assert flights[0].ended <= flights[1].began


def test_watching_changes_no_value():
    def train(watched):
        engine = Owner()
        with watch_states(engine) if watched else span("nothing"):
            engine.backward(engine.module(torch.arange(4.0).view(2, 2)).square().sum())
        return [None if p.grad is None else p.grad.clone() for p in engine.parameters]

    plain = launch(train, 2, (False,), device="cpu").results
    watched = launch(train, 2, (True,), device="cpu").results
    for expected, found in zip(plain, watched, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_outside_a_metered_launch_it_does_nothing():
    with watch_states("anything"):
        pass
    run = launch(plain_step, 1, device="cpu", meter=False)
    assert run.states == [[]]


class Wrong:
    def __init__(self, yields):
        self.module, self.yields = model_of(), yields

    def states(self):
        yield self.yields


@pytest.mark.parametrize(
    ("yields", "problem"),
    [
        (("optimizer", torch.zeros(3), []), "it must yield one of weights, gradients, master"),
        (("master", 3, []), r"states\(\) yielded \('master', int, ...\)"),
        (("master", torch.zeros(3)), "three things: kind, tensor, pieces; it yielded 2"),
        (7, "must yield .kind, tensor, pieces.; it yielded int"),
    ],
)
def test_what_states_must_not_yield(yields, problem):
    def step():
        with watch_states(Wrong(yields)):
            pass

    with pytest.raises(LaunchError, match=problem):
        launch(step, 1, device="cpu")


def test_something_without_a_model_is_refused():
    def step():
        with watch_states(torch.optim.SGD([torch.zeros(1, requires_grad=True)])):
            pass

    with pytest.raises(LaunchError, match="give it an engine with a model .* It got a SGD"):
        launch(step, 1, device="cpu")


def fsdp_step():
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)  # the root: what is no root is freed after its forward
    optimizer = torch.optim.AdamW(model.parameters())
    for watched in (False, True):
        optimizer.zero_grad()
        with watch_states(model, optimizer) if watched else span("nothing"):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_torchs_own_fsdp_is_seen():
    """Its parameters are DTensors between steps, and whole tensors in their layer's forward and backward."""
    record = shard_map(launch(fsdp_step, 2, device="cpu"), "zero3", state=FP32_ADAM)
    # FSDP2 cuts rows: one of two each; of three, two and one.
    own = (((0, 2), (4, 8)), ((2, 4), (8, 10)))
    for rank in (0, 1):
        assert record.own(rank) == own[rank] and record.left_over(rank) == {}
        assert record.last[rank].held == dict.fromkeys(
            ("weights", "gradients", "first_moment", "second_moment"), own[rank]
        )
    weights = dict(zip(events(record), held(record, "weights"), strict=True))
    assert weights["start"] == own[0]
    assert weights["forward 0"] == ((0, 8),) and weights["forward 1"] == ((0, 2), SECOND)

"""The memory meter tells parameters, gradients and optimizer state apart, over time and exactly."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist

from shardlab.meters import label
from shardlab.meters.states import StateFinder
from shardlab.meters.timeline import MOST_SAMPLES, Timeline
from shardlab.records import RankMemory
from shardlab.runtime import launch

FLOAT = 4


def memory_of(fn, world_size=1, **options) -> RankMemory:
    """Rank 0's memory in a run of `fn` on the CPU."""
    return launch(fn, world_size, device="cpu", timeout=30, **options).memory[0]


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))


TENSORS = 4
PSI = sum(parameter.numel() for parameter in net().parameters())


def split(sample):
    return sample.parameters, sample.gradients, sample.optimizer


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.ones(3, 100)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_adamw_holds_two_moments_and_a_step_per_tensor():
    def step():
        model = net()
        return train(model, torch.optim.AdamW(model.parameters()))

    end = memory_of(step).at_end
    assert split(end) == (4 * PSI, 4 * PSI, 8 * PSI + TENSORS * FLOAT)
    assert end.other < 1000


def test_sgd_holds_nothing_but_weights_and_gradients():
    def step():
        model = net()
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert split(memory_of(step).at_end) == (4 * PSI, 4 * PSI, 0)


def test_gradients_are_gone_after_zero_grad_and_zero_after_zero_grad_in_place():
    def step(set_to_none):
        model, optimizer = train(model := net(), torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.zero_grad(set_to_none=set_to_none)
        return model

    assert memory_of(step, args=(True,)).at_end.gradients == 0
    assert memory_of(step, args=(False,)).at_end.gradients == 4 * PSI


def test_the_kinds_over_time():
    """Gradients grow while backward runs, though each is known to be one only when it is in place."""

    def step():
        model = net()
        train(model, torch.optim.AdamW(model.parameters()), steps=1)
        model.zero_grad()
        return model

    samples = memory_of(step).samples
    levels = [sample.gradients for sample in samples]
    rising = levels[: levels.index(max(levels)) + 1]
    assert rising == sorted(rising) and len(set(rising)) == TENSORS + 1 and max(levels) == 4 * PSI
    assert levels[-1] == 0 and samples[-1].parameters == 4 * PSI
    assert all(sample.other >= 0 for sample in samples)
    first_state = next(i for i, sample in enumerate(samples) if sample.optimizer)
    assert levels[first_state] == 4 * PSI  # the moments are made in the first step, after backward


def test_a_gradient_freed_inside_backward_was_a_gradient():
    def step():
        model = net()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        model(torch.ones(3, 100)).sum().backward()
        return model

    memory = memory_of(step)
    largest = max(parameter.numel() for parameter in net().parameters())
    assert max(sample.gradients for sample in memory.samples) < 4 * PSI
    assert max(sample.gradients for sample in memory.samples) >= 4 * largest
    assert memory.at_end.gradients == 0


@pytest.mark.parametrize("how", ["argument", "global", "deepcopy"])
def test_models_that_were_made_elsewhere(how):
    model = net()

    def step(given=None):
        mine = given if how == "argument" else model
        if how == "deepcopy":
            mine = copy.deepcopy(model)
        mine(torch.ones(3, 100)).sum().backward()
        return mine

    end = memory_of(step, args=(model,) if how == "argument" else ()).at_end
    assert split(end) == ((8 if how == "deepcopy" else 4) * PSI, 4 * PSI, 0)


def test_data_that_is_swapped_in_is_a_parameter_too():
    def step():
        layer = torch.nn.Linear(100, 100, bias=False)
        layer.weight.data = torch.zeros(50, 100)
        layer(torch.ones(1, 100))
        return layer

    end = memory_of(step).at_end
    assert split(end) == (4 * 50 * 100, 0, 0)


def test_label_says_what_hand_written_code_keeps():
    def step():
        master, shard, bucket = torch.zeros(1000), torch.zeros(300), torch.zeros(70)
        label("optimizer", [master])
        label("parameters", [shard[10:20]])  # a view stands for its storage
        label("gradients", [bucket])
        label("optimizer", [bucket])  # the last one counts
        return master, shard, bucket

    assert split(memory_of(step).at_end) == (1200, 0, 4280)


def test_label_beats_what_torch_knows():
    def step():
        master = torch.nn.Linear(10, 10, bias=False)
        label("optimizer", master.parameters())
        master(torch.ones(1, 10)).sum().backward()
        torch.optim.SGD(master.parameters(), lr=0.1).step()
        return master

    assert split(memory_of(step).at_end) == (0, 400, 400)


def test_label_refuses_an_unknown_kind_and_does_nothing_outside_a_launch():
    def step():
        with pytest.raises(ValueError, match="'weights' is no kind of state"):
            label("weights", [torch.zeros(1)])

    memory_of(step)
    label("parameters", [torch.zeros(1)])


def test_training_does_not_grow():
    def step(steps):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        levels = []
        from shardlab.meters.instruments import _current

        for _ in range(steps):
            optimizer.zero_grad()
            train(model, optimizer, steps=1)
            levels.append(_current[0].memory._live)
        return levels, model

    run = launch(step, 1, args=(50,), device="cpu", timeout=30)
    levels = run.results[0][0]
    assert set(levels[1:]) == {levels[1]}
    assert run.memory[0].peak == max(sample.live for sample in run.memory[0].samples)


def test_ddp_and_fsdp_hold_what_they_say():
    def ddp():
        from torch.nn.parallel import DistributedDataParallel

        model = net()
        return train(DistributedDataParallel(model), torch.optim.AdamW(model.parameters()))[1].state_dict()["state"]

    def fsdp():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        HOLD.extend(train(model, torch.optim.AdamW(model.parameters())))

    memory = memory_of(ddp, world_size=2)
    assert max(sample.optimizer for sample in memory.samples) == 8 * PSI + TENSORS * FLOAT
    assert max(sample.gradients for sample in memory.samples) >= 4 * PSI

    end = memory_of(fsdp, world_size=2).at_end
    shard = PSI // 2  # every dimension is even
    assert split(end) == (4 * shard, 4 * shard, 8 * shard + TENSORS * FLOAT)


HOLD: list = []  # what a rank keeps until it ends


def test_a_long_time_line_is_thinned_and_keeps_its_peaks():
    timeline = Timeline()
    for moment in range(10 * MOST_SAMPLES):
        timeline.changed(moment, moment, 1 if moment != 12_345 else 1000)
        timeline.changed(moment, moment, -1 if moment != 12_345 else -1000)
        if timeline.full:
            timeline.settle({12_345: "gradients"}, moment)
    last = timeline.settle({}, 99_999)
    assert len(timeline.samples) < MOST_SAMPLES and last.live == 0
    peak = max(timeline.samples, key=lambda sample: sample.live)
    assert (peak.live, peak.gradients, peak.time) == (1000, 1000, 12_345)


def test_a_storage_is_what_it_turns_out_to_be_from_its_first_moment():
    timeline = Timeline()
    timeline.changed(0.0, 7, 100)
    timeline.changed(1.0, 8, 10)
    assert split(timeline.settle({7: "optimizer"}, 2.0)) == (0, 0, 100)
    timeline.changed(3.0, 8, 5)
    assert split(timeline.settle({7: "optimizer", 8: "gradients"}, 4.0)) == (0, 15, 100)
    assert [split(sample) for sample in timeline.samples] == [(0, 0, 100), (0, 0, 100), (0, 15, 100)]


def test_ranks_have_memories_of_their_own():
    def step():
        return torch.zeros(100 * (dist.get_rank() + 1))

    run = launch(step, 3, device="cpu")
    assert [memory.at_end.live for memory in run.memory] == [400, 800, 1200]


def test_a_thread_beside_backward_does_not_read_gradients():
    """Autograd writes `.grad` without the interpreter's lock; reading it from another thread meanwhile can crash."""

    def rank():
        model = net()
        model(torch.ones(3, 100)).sum().backward()
        mine = threading.get_ident()
        looking = []
        look = StateFinder.look
        StateFinder.look = lambda finder: (looking.append(threading.get_ident()), look(finder))[1]
        try:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
            thread.start()
            thread.join()
            other = list(looking)
            dist.all_reduce(torch.ones(1))
        finally:
            StateFinder.look = look
        return other, set(looking) == {mine}

    assert launch(rank, 1, device="cpu", timeout=30).results == [([], True)]

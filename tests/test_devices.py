"""Logical devices: tensors live where they were made, what mixes devices raises, every crossing is counted."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from shardlab.devices import LogicalDevice, device_of, launch_devices, move, on
from shardlab.meters import mark
from shardlab.records import Run

MIXED = "Expected all tensors to be on the same device, but found at least two devices, "


def run(fn, devices=3, args=()) -> Run:
    return launch_devices(fn, devices, args, device="cpu", timeout=20)


def result(fn, devices=3, args=()):
    return run(fn, devices, args).results[0]


def error_of(work) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_results_live_where_their_inputs_live():
    def work(devices):
        x = torch.randn(4, 4).to(devices[1])
        made = [x + 1, x @ x, x.sum(), x[0], x.t().contiguous(), x > 0, torch.zeros_like(x), x.new_empty(3), x.clone()]
        made += [*x.split(2), *torch.topk(x, 2), torch.cat([x, x]), x.detach(), x.double(), x.add_(1), x.to(devices[1])]
        made += [
            torch.add(x, 1, out=torch.empty_like(x)),
            copy.deepcopy(x),
            x[torch.tensor([0, 1])],
            x * torch.ones(()),
        ]
        return {device_of(each) for each in made}, device_of(torch.ones(3)), torch.device("cpu")

    seen, host, cpu = result(work)
    assert seen == {LogicalDevice(1)} and host == cpu


def test_new_tensors_land_where_the_thread_works():
    def work(devices):
        inside = {}

        def thread():
            inside["before"] = device_of(torch.zeros(2))
            with on(devices[2]):
                inside["in"] = (
                    device_of(torch.zeros(2)),
                    device_of(torch.tensor([1.0])),
                    device_of(nn.Linear(2, 2).weight),
                )

        with on(devices[1]):
            first = device_of(torch.empty(3))
            with on(devices[0]):
                inner = device_of(torch.randn(3))
            again = device_of(torch.arange(3))
            other = threading.Thread(target=thread)
            other.start()
            other.join()
        return first, inner, again, inside, device_of(torch.ones(1))

    one, zero, two, host = *(LogicalDevice(i) for i in (1, 0, 2)), torch.device("cpu")
    assert result(work) == (one, zero, one, {"before": host, "in": (two, two, two)}, host)


def test_what_mixes_devices_raises_in_torchs_words():
    def work(devices):
        a, b, host = torch.ones(2, 2).to(devices[0]), torch.ones(2, 2).to(devices[1]), torch.ones(2, 2)
        layer = nn.Linear(2, 2).to(devices[1])
        return [
            error_of(lambda: a + b),
            error_of(lambda: b.add_(a)),
            error_of(lambda: torch.cat([a, b])),
            error_of(lambda: layer(a)),
            error_of(lambda: layer(host)),
            error_of(lambda: torch.stack([a.sum(), b.sum()])),
            error_of(lambda: nn.functional.mse_loss(a, b)),
            error_of(lambda: a + host),
            error_of(lambda: a + torch.tensor(2.0)),
        ]

    errors = result(work)
    assert all(error.startswith(MIXED) for error in errors[:-1])
    assert "device 0 and device 1!" in errors[0] and "device 0 and cpu!" in errors[-2]
    assert errors[-1] == "no error"  # a number from the host mixes with anything


@pytest.mark.parametrize("how", ["thread", "pool", "main"])
def test_backward_stays_on_its_device(how):
    def work(devices, how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 5))
        model = model.to(devices[1])
        tokens = torch.tensor([[0, 1], [2, 3]]).to(devices[1])

        def step():
            logits = model(tokens)
            part = logits[:, 0]
            part[0] *= 2  # writes into a view: backward makes a tensor from nothing
            (nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + part.max(1).values.sum()).backward()

        if how == "thread":
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
        elif how == "pool":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(step).result()
        else:
            step()
        return {device_of(parameter.grad) for parameter in model.parameters()}

    assert result(work, args=(how,)) == {LogicalDevice(1)}


def test_optimizers_step_on_their_device():
    def work(devices):
        torch.manual_seed(0)
        plain = nn.Linear(3, 3)
        model = copy.deepcopy(plain).to(devices[2])
        seen = []
        for make in (torch.optim.AdamW, torch.optim.SGD, lambda p: torch.optim.AdamW(p, fused=True)):
            ours, theirs = make(model.parameters()), make(plain.parameters())
            for module, device in ((model, devices[2]), (plain, None)):
                inputs = torch.ones(2, 3) if device is None else torch.ones(2, 3).to(device)
                module(inputs).sum().backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
            seen += [device_of(v) for state in ours.state.values() for v in state.values() if v.dim()]
        equal = all(a.tolist() == b.tolist() for a, b in zip(plain.parameters(), model.parameters(), strict=True))
        mixed = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).to(devices[0]).parameters()], lr=1, momentum=0.5)
        for parameter in mixed.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        mixed.step()  # one call for tensors of two devices: each position by itself
        return equal, set(seen), [device_of(state["momentum_buffer"]).index for state in mixed.state.values()]

    equal, seen, momenta = result(work)
    assert equal and seen == {LogicalDevice(2)} and momenta == [2, 2, 0, 0]


def test_modules_move_and_are_copied_whole():
    def work(devices):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[0].weight.grad = torch.ones(3, 2)
        parameters = list(model.parameters())
        model.to(devices[1])
        same = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        twin = copy.deepcopy(model)
        everything = [*model.parameters(), *model.buffers(), model[0].weight.grad, *twin.parameters(), *twin.buffers()]
        shared = twin[0].weight.untyped_storage()._cdata == model[0].weight.untyped_storage()._cdata
        return same, shared, {device_of(each) for each in everything}

    assert result(work) == (True, False, {LogicalDevice(1)})


def test_move_is_counted_on_both_sides_and_names_what_it_carried():
    def work(devices):
        x = torch.arange(12.0).view(4, 3).to(devices[0])
        there = move(x, devices[1], "inputs")
        assert move(there, devices[1]) is there
        column = move(x[:, 1], devices[2])
        x.zero_()
        half = move(there.half(), devices[0], "back")
        return device_of(there), there.tolist(), column.tolist(), device_of(half).index

    record = run(work)
    device, values, column, back = record.results[0]
    assert (device, back) == (LogicalDevice(1), 0) and values[3] == [9, 10, 11] and column == [1, 4, 7, 10]
    zero, one, two = record.traffic
    assert (zero.sent, zero.received, one.sent, one.received, two.sent, two.received) == (64, 24, 24, 48, 0, 16)
    assert zero.by_peer[1].sent == 48 and zero.by_peer[2].sent == 16 and zero.by_what["inputs"].sent == 48
    assert set(zero.by_what) == {"inputs", "other", "back"}
    call = record.calls[0][0]
    assert (call.op, call.peer, call.numel, call.dtype, call.index) == ("send", 1, 12, "float32", 0)
    assert call.where is not None and call.where.function == "work"
    assert record.calls[1][0].op == "recv" and len(record.events) == 2 * 6


def test_a_move_is_differentiable_and_its_way_back_counted():
    def work(devices):
        weight = nn.Parameter(torch.ones(3).to(devices[0]))
        loss = (move(weight, devices[1]) * torch.arange(3.0).to(devices[1])).sum()
        loss.backward()
        with torch.no_grad():
            cut = move(weight, devices[1])
        host = nn.Parameter(torch.ones(2))
        move(host, devices[2]).sum().backward()
        return weight.grad.tolist(), device_of(weight.grad).index, cut.requires_grad, device_of(host.grad)

    record = run(work)
    assert record.results[0] == ([0, 1, 2], 0, False, torch.device("cpu"))
    assert record.traffic[1].by_what["gradients"].sent == 12 and record.traffic[0].received == 12
    assert record.traffic[0].by_what["other"].sent == 24


def test_a_plain_copy_between_devices_is_counted_too():
    def work(devices):
        source, target = torch.ones(4).to(devices[0]), torch.zeros(4).to(devices[1])
        target.copy_(source)
        target[:2] = source[2:]
        torch._foreach_copy_([target, target], [source, source])
        nn.Linear(1, 4, bias=False).to(devices[2]).load_state_dict({"weight": source.view(4, 1)})
        host = torch.zeros(4)
        host.copy_(source)  # and back in would be free: the way out is what counts
        target.copy_(torch.ones(4))
        return target.tolist()

    record = run(work)
    assert [each.sent for each in record.traffic] == [16 + 8 + 32 + 16 + 16, 0, 0]
    assert [each.received for each in record.traffic] == [0, 56, 16]


def test_what_is_said_of_a_device_that_is_none():
    def work(devices):
        x = torch.ones(2).to(devices[0])
        said = []
        for wrong in (lambda: move(x, 1), lambda: move([1], devices[0]), lambda: move(x, LogicalDevice(7))):
            try:
                wrong()
            except (TypeError, RuntimeError) as error:
                said.append(str(error))
        return said

    number, value, stranger = result(work)
    assert "expected one of the devices" in number and "got a list" in value
    assert stranger == "there is no device 7; the devices of this launch are device 0, device 1, device 2"
    with pytest.raises(RuntimeError, match="only inside a function that is given to launch_devices"):
        move(torch.ones(1), LogicalDevice(0))


def test_to_is_as_ever_outside_and_afterwards():
    def work(devices):
        x = torch.ones(2).to(torch.float64).to(device=devices[1], non_blocking=True)
        y = x.to(devices[0], torch.float32)
        return x.dtype, device_of(x).index, y.dtype, device_of(y).index, torch.ones(1).to("cpu").tolist()

    assert result(work) == (torch.float64, 1, torch.float32, 0, [1])
    assert "to" not in vars(torch.Tensor) and torch.ones(1).to(torch.int64).dtype == torch.int64


def test_a_run_of_devices_says_so():
    record = run(lambda devices: repr(devices), 2)
    assert record.results == ["[device 0, device 1]"]
    assert repr(record).startswith("Run of 2 devices (cpu, threads)") and "busiest device" in repr(record)
    assert (record.world_size, len(record.calls), len(record.memory), len(record.marks)) == (2, 2, 2, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; two show transfers as well")
def test_gpus_are_counted_as_logical_devices_are():
    def work(devices):
        last = devices[-1]
        layer = nn.Linear(4, 4, bias=False).to(devices[0])
        weight = move(layer.weight, last, "parameters")
        with on(last):
            inputs = torch.ones(2, 4)
        (inputs @ weight).sum().backward()
        plain = layer.weight.detach().to(last)
        plain.copy_(layer.weight.detach())
        mark("end")
        return device_of(inputs).index, device_of(layer.weight.grad).index, layer.weight.grad.tolist()

    count = min(2, torch.cuda.device_count())
    runs = [launch_devices(work, count, device=device) for device in ("cuda", "cpu")]
    assert runs[0].results == runs[1].results
    for gpu, logical in zip(*(each.traffic for each in runs), strict=True):
        assert (gpu.sent, gpu.received) == (logical.sent, logical.received)
    for run_of in runs:
        (end,) = [event.time for event in run_of.events if event.kind == "mark"]
        assert (run_of.memory[0].at(end).parameters, run_of.memory[0].at(end).gradients) == (64, 64)


def test_logical_devices_pass_what_is_asked_of_gpus():
    """The same function as above, where there is no GPU: both transfers are the ones that move counts."""

    def work(devices):
        layer = nn.Linear(4, 4, bias=False).to(devices[0])
        weight = move(layer.weight, devices[1], "parameters")
        with on(devices[1]):
            inputs = torch.ones(2, 4)
        (inputs @ weight).sum().backward()
        plain = layer.weight.detach().to(devices[1])
        plain.copy_(layer.weight.detach())
        return layer.weight.grad.tolist()

    record = run(work, 2)
    assert record.results[0] == [[2.0] * 4] * 4
    assert [(one.sent, one.received) for one in record.traffic] == [(3 * 64, 64), (64, 3 * 64)]

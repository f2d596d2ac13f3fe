"""Devices: what each holds, by kind, on one time line; marks of the device that a thread works on."""

from __future__ import annotations

import threading

import torch
from torch import nn

from shardlab import launch_devices, move, on
from shardlab.meters import label, mark

KB = 1 << 10


def run(fn, devices=2, args=()):
    return launch_devices(fn, devices, args, device="cpu", timeout=20)


def kilobytes(count):
    return torch.ones(count * KB, dtype=torch.uint8)


def test_each_device_holds_its_own():
    def work(devices):
        kilobytes(9)  # on the host: nobody's
        a = kilobytes(1).to(devices[0])
        b = kilobytes(2).to(devices[1])
        b = torch.cat([b, b])
        mark("both")
        del b
        mark("one")
        return len(a.view(2, -1)[0])

    record = run(work)
    both, one = [event.time for event in record.events if event.kind == "mark"]
    assert [memory.at(both).live for memory in record.memory] == [KB, 4 * KB]
    assert [memory.at(one).live for memory in record.memory] == [KB, 0]
    assert [memory.peak for memory in record.memory] == [KB, 6 * KB]
    assert [memory.at_end.live for memory in record.memory] == [0, 0]
    assert record.memory[0].at(0.0).live == 0


def test_the_kinds_of_every_device_are_told_apart():
    def work(devices):
        held = []
        for device in devices:
            model = nn.Linear(8, 8, bias=False).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            thread = threading.Thread(
                target=lambda model=model, d=device: model(torch.ones(2, 8).to(d)).sum().backward()
            )
            thread.start()
            thread.join()
            if device.index == 0:
                optimizer.step()
            held.append((model, optimizer))
        mine = torch.zeros(16).to(devices[1])
        label("optimizer", [mine])
        mark("end")
        return len(held)

    record = run(work)
    (end,) = [event.time for event in record.events if event.kind == "mark"]
    zero, one = (memory.at(end) for memory in record.memory)
    assert (zero.parameters, zero.gradients, zero.optimizer) == (256, 256, 256)
    assert (one.parameters, one.gradients, one.optimizer) == (256, 256, 64)


def test_storages_that_are_resized_or_freed_are_followed():
    def work(devices):
        x = kilobytes(4).to(devices[1])
        x.untyped_storage().resize_(0)
        mark("empty")
        x.untyped_storage().resize_(KB)
        mark("small")

    record = run(work)
    empty, small = [event.time for event in record.events if event.kind == "mark"]
    assert (record.memory[1].at(empty).live, record.memory[1].at(small).live) == (0, KB)
    assert record.memory[0].peak == 0


def test_a_transfer_of_labelled_tensors_is_named_by_itself():
    def work(devices):
        layer = nn.Linear(4, 4, bias=False).to(devices[0])
        layer(torch.ones(1, 4).to(devices[0])).sum().backward()
        move(layer.weight.detach(), devices[1])
        move(layer.weight.grad, devices[1])
        move(layer.weight.detach() + 1, devices[1])

    (zero, _) = run(work).traffic
    assert {what: totals.sent for what, totals in zero.by_what.items()} == {
        "parameters": 64,
        "gradients": 64,
        "other": 64,
    }


def test_a_mark_belongs_to_the_device_of_its_thread():
    def work(devices):
        def thread():
            with on(devices[1]):
                mark("in the thread")

        mark("outside")
        other = threading.Thread(target=thread)
        other.start()
        other.join()

    record = run(work)
    assert [(event.label, event.rank) for event in record.events] == [("outside", 0), ("in the thread", 1)]
    assert [len(marks) for marks in record.marks] == [1, 1]


def test_many_threads_at_once_lose_nothing():
    def work(devices):
        def thread(device):
            with on(device):
                for _ in range(40):
                    layer = nn.Linear(8, 8)
                    loss = layer(torch.ones(4, 8)).sum()
                    loss.backward()
                    move(layer.weight.detach(), devices[(device.index + 1) % len(devices)])

        threads = [threading.Thread(target=thread, args=(device,)) for device in devices]
        [each.start() for each in threads]
        [each.join() for each in threads]

    record = run(work, 4)
    assert [each.sent for each in record.traffic] == [40 * 256] * 4 == [each.received for each in record.traffic]
    assert [call.index for call in record.calls[2]] == list(range(80))
    assert [memory.at_end.live for memory in record.memory] == [0] * 4

"""The memory meter: live bytes by storage, each counted once and no longer than it lives."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from shardlab.records import RankMemory
from shardlab.runtime import launch

MB = 1 << 20


def memory_of(fn, world_size=1, **options) -> RankMemory:
    """Rank 0's memory in a run of `fn` on the CPU."""
    return launch(fn, world_size, device="cpu", timeout=30, **options).memory[0]


def megabyte():
    return torch.empty(MB, dtype=torch.uint8)


HOLD: list = []  # what a rank keeps until it ends


def live(memory: RankMemory) -> list[int]:
    return [sample.live for sample in memory.samples]


def test_live_bytes_rise_and_fall_with_the_tensors():
    def step():
        first = megabyte()
        second = torch.zeros(2 * MB, dtype=torch.uint8)
        del first
        third = torch.ones(3 * MB // 4)
        del second, third

    memory = memory_of(step)
    assert live(memory) == [MB, 3 * MB, 2 * MB, 5 * MB, 3 * MB, 0]
    assert (memory.peak, memory.at_end.live) == (5 * MB, 0)
    assert [sample.time for sample in memory.samples] == sorted(sample.time for sample in memory.samples)


def test_what_is_returned_or_global_is_still_live_at_the_end():
    memory = memory_of(lambda: [megabyte(), megabyte()])
    assert memory.at_end.live == 2 * MB


def test_views_count_once():
    def step():
        whole = torch.zeros(4, MB // 4)
        views = [whole[0], whole.t(), whole.view(-1), whole.expand(7, 4, MB // 4), whole.detach(), *whole.unbind()]
        views += [torch.as_tensor(whole.numpy()).view(torch.int32), whole.untyped_storage()]
        del whole
        return len(views)

    memory = memory_of(step)
    # numpy() shares the memory but torch.as_tensor makes a storage of its own over it
    assert max(live(memory)[:1]) == 4 * MB and memory.at_end.live == 0


def test_in_place_operations_and_views_of_a_part_hold_no_more():
    def step():
        data = megabyte()
        for _ in range(5):
            data.add_(1).mul_(2).clamp_(max=3)
        tail = data[MB // 2 :]
        tail.zero_()
        torch.add(data, 1, out=data)
        del data
        return tail[:0]

    memory = memory_of(step)
    assert memory.peak == MB and memory.at_end.live == MB  # a view of no elements keeps the whole storage


@pytest.mark.parametrize("guard", ["no_grad", "inference_mode"])
def test_memory_is_seen_without_gradients(guard):
    def step():
        with getattr(torch, guard)():
            kept = megabyte()
            (kept + 1).sum()
        return kept

    memory = memory_of(step)
    assert memory.peak >= 2 * MB and MB <= memory.at_end.live < MB + 100


MAKERS = {
    "empty": lambda: torch.empty(MB, dtype=torch.uint8),
    "ones": lambda: torch.ones(MB // 4),
    "tensor": lambda: torch.tensor([1.0] * (MB // 4)),
    "arange": lambda: torch.arange(MB // 8),
    "randn": lambda: torch.randn(MB // 4),
    "from_numpy": lambda: torch.from_numpy(__import__("numpy").ones(MB // 8)) * 1.0,
    "frombuffer": lambda: torch.frombuffer(bytearray(MB), dtype=torch.uint8).clone(),
    "deepcopy": lambda: __import__("copy").deepcopy(torch.zeros(MB // 4)),
    "Parameter": lambda: torch.nn.Parameter(torch.zeros(MB // 4)),
    "new_empty": lambda: torch.ones(1).new_empty(MB // 4),
    "legacy constructor": lambda: torch.FloatTensor(MB // 4),
    "storage": lambda: torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(MB)),
}


def test_every_way_of_making_a_tensor_is_seen():
    def sizes():
        from shardlab.meters.instruments import _current

        meter = _current[0].memory
        seen = {}
        for name, make in MAKERS.items():
            before = meter._live
            made = make()
            seen[name] = meter._live - before
            del made
        return seen

    (seen,) = launch(sizes, 1, device="cpu").results
    assert seen == dict.fromkeys(MAKERS, MB)


def test_a_tensor_over_foreign_memory_counts_once_it_is_used():
    def step():
        array = __import__("numpy").ones(MB, dtype="uint8")
        tensor = torch.from_numpy(array)
        tensor.add_(1)
        return tensor

    memory = memory_of(step)
    assert memory.at_end.live == MB


def test_arguments_and_globals_of_the_function_are_counted():
    weights = torch.ones(MB // 4)

    def step(data, options):
        return float(weights[0] + data[0] + options["more"][0])

    memory = memory_of(step, args=(torch.ones(MB // 2),), kwargs={"options": {"more": torch.ones(MB // 4)}})
    assert memory.samples[0].live > 0 and memory.peak == pytest.approx(4 * MB, abs=100)


def test_a_storage_resized_to_nothing_is_freed_and_counts_again_when_it_is_back():
    def step():
        kept = megabyte()
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(2 * MB)
        kept.resize_(3 * MB)
        kept.set_(torch.empty(0, dtype=torch.uint8))

    memory = memory_of(step)
    assert live(memory) == [MB, 0, 2 * MB, 3 * MB, 0]


def test_memory_that_a_thread_of_the_learner_holds_is_counted():
    def step():
        kept = []
        thread = threading.Thread(target=lambda: kept.append(megabyte()))
        thread.start()
        thread.join()
        now = kept[0]
        kept.clear()
        return now

    assert memory_of(step).at_end.live == MB


def test_what_the_autograd_graph_keeps_is_live():
    def step():
        data = torch.ones(MB // 4, requires_grad=True)
        result = (data * 2).exp()  # exp keeps its result, the product is freed
        del data
        kept = result.sum()
        del result
        return float(kept.detach())

    memory = memory_of(step)
    assert max(live(memory)) == 3 * MB and memory.at_end.live == 0


def test_swapping_param_data_frees_nothing_while_the_graph_holds_the_weight():
    """numel() says that the weight is sharded, but backward still needs the whole of it."""

    def swap(backward):
        layer = torch.nn.Linear(256, MB // 1024, bias=False)
        loss = layer(torch.ones(1, 256, requires_grad=True)).sum()
        layer.weight.data = torch.zeros(8)
        assert layer.weight.numel() == 8
        HOLD.append(layer if backward else (layer, loss))  # the loss holds the graph

    kept, freed = (memory_of(swap, args=(backward,)).at_end for backward in (False, True))
    assert (kept.parameters, freed.parameters) == (MB + 32, 32)
    assert kept.other < 2000 and freed.other < 2000  # the input


def test_freed_storages_are_forgotten_even_when_freed_by_the_garbage_collector():
    def step():
        import gc

        class Knot:
            pass

        for _ in range(3):
            knot = Knot()
            knot.self, knot.data = knot, megabyte()
        del knot
        gc.collect()

    memory = memory_of(step)
    assert memory.at_end.live == 0 and MB <= memory.peak <= 3 * MB


def test_fake_tensors_hold_nothing():
    def step():
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            model = torch.nn.Linear(4096, 4096)
            model(torch.empty(8, 4096)).sum().backward()
        return torch.empty(1000, device="meta").numel()

    assert memory_of(step).peak == 0


def test_communication_holds_nothing_that_stays():
    def step():
        data = megabyte()
        for _ in range(3):
            dist.all_reduce(data)
        return data

    memory = memory_of(step, world_size=2)
    assert memory.at_end.live == MB

"""The traffic meter sees a call whoever makes it: a cell, a thread, torch's own DDP and FSDP2."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce, isend, recv

from shardlab.meters import on_call
from shardlab.runtime import launch

FLOAT = 4  # bytes of a float32
N = 4
n = 8 * FLOAT  # bytes of a tensor of 8 elements


def measured(fn, world_size=2, **options):
    """A run of `fn` on the CPU."""
    return launch(fn, world_size, device="cpu", timeout=30, **options)


def test_names_imported_into_a_cell():
    def ring():
        rank = dist.get_rank()
        sending = isend(torch.ones(3), 1 - rank)
        recv(torch.empty(3), 1 - rank)
        sending.wait()
        all_reduce(torch.ones(4))

    for calls in measured(ring).calls:
        assert [(call.op, call.sent, call.received) for call in calls] == [
            ("send", 12, 0),
            ("recv", 0, 12),
            ("all_reduce", 16, 16),
        ]


def test_calls_from_threads_of_the_learner():
    def in_threads():
        from concurrent.futures import ThreadPoolExecutor

        groups = [dist.new_group([0, 1]) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda group: [dist.all_reduce(torch.ones(4), group=group) for _ in range(5)], groups))

    for calls in measured(in_threads).calls:
        assert [call.op for call in calls if call.op != "barrier"] == ["all_reduce"] * 10
        assert [call.index for call in calls] == list(range(len(calls)))


def test_objects_count_as_the_tensors_they_travel_in():
    def exchange():
        everything = [None, None]
        dist.all_gather_object(everything, {"rank": dist.get_rank()})
        return everything

    run = measured(exchange)
    assert run.results[0] == [{"rank": 0}, {"rank": 1}]
    sizes, payload = run.calls[0]
    assert (sizes.op, sizes.dtype, sizes.numel, sizes.sent) == ("all_gather", "int64", 1, 8)
    assert (payload.op, payload.dtype, payload.sent) == ("all_gather", "uint8", payload.numel)


def test_functional_collectives_count_once():
    import torch.distributed._functional_collectives as functional

    def compute():
        warnings.simplefilter("ignore")
        world = dist.group.WORLD
        results = [
            functional.all_reduce(torch.ones(8), "sum", world),
            functional.all_gather_tensor(torch.ones(2), 0, world),
            functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, world),
            functional.all_reduce_coalesced([torch.ones(5), torch.ones(3)], "sum", world)[0],
        ]
        return [float((result + 0)[0]) for result in results]

    run = measured(compute, N)
    assert run.results[0] == [4, 1, 4, 4]
    for calls in run.calls:
        assert [(call.op, call.sent, call.received) for call in calls] == [
            ("all_reduce", 1.5 * n, 1.5 * n),
            ("all_gather", 0.75 * n, 0.75 * n),
            ("reduce_scatter", 0.75 * n, 0.75 * n),
            ("all_reduce", 1.5 * n, 1.5 * n),
        ]
        # The tensors of the first four calls were used, which waits; the fourth's second tensor never was.
        assert [call.completed is not None for call in calls] == [True, True, True, True]


# --- torch's own strategies


class Net(torch.nn.Module):
    """Three layers, so that DDP makes several buckets and FSDP several groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.layers(x)).square().mean()


GRADIENT_BYTES = sum(parameter.numel() for parameter in Net().parameters()) * FLOAT
BUFFER_BYTES = 2 * 16 * FLOAT + 8  # running mean and variance, and the int64 number of batches


def train_ddp(steps, broadcast_buffers):
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.002, broadcast_buffers=broadcast_buffers)
    dist.barrier()
    for _ in range(steps):
        model(torch.randn(4, 16)).backward()
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_reduces_its_gradients_once_a_step(world_size):
    run = measured(train_ddp, world_size, args=(3, False))
    for rank, calls in enumerate(run.calls):
        barriers = [position for position, call in enumerate(calls) if call.op == "barrier"]
        setup, *steps = [calls[a + 1 : b] for a, b in zip([-1, *barriers], barriers, strict=False)]
        for step in steps:
            reductions = [call for call in step if call.op == "all_reduce"]
            assert sum(call.sent for call in reductions) == pytest.approx(
                2 * (world_size - 1) / world_size * GRADIENT_BYTES
            )
            assert all(call.completed is not None for call in reductions)
        # After its first step DDP tells the ranks in which order gradients came; from then on it only reduces.
        assert {call.op for call in steps[2]} == {"all_reduce"} and len(steps[2]) > 1  # several buckets
        weights = [call for call in setup if call.op == "broadcast" and call.dtype == "float32"]
        spread = sum(call.sent + call.received for call in weights)
        assert spread == GRADIENT_BYTES * (2 if 0 < rank < world_size - 1 else 1)


def test_ddp_broadcasts_buffers_before_each_forward_when_asked():
    with_buffers, without = (measured(train_ddp, 2, args=(3, wanted)) for wanted in (True, False))
    sent = [run.traffic[0].by_operation["broadcast"].sent for run in (with_buffers, without)]
    assert sent[0] - sent[1] == (1 + 3) * BUFFER_BYTES  # once when it was made


def train_fsdp(steps):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    dist.barrier()
    for _ in range(steps):
        model(torch.randn(4, 16)).backward()
        dist.barrier()


def test_fsdp2_gathers_twice_and_scatters_once():
    """The layers are gathered for forward and again for backward; the rest, in the root, stays gathered between."""
    world_size = 2
    run = measured(train_fsdp, world_size, args=(2,))
    layers = 3 * (16 * 16 + 16) * FLOAT
    for calls in run.calls:
        barriers = [position for position, call in enumerate(calls) if call.op == "barrier"]
        step = calls[barriers[-2] + 1 : barriers[-1]]
        assert {call.op for call in step} == {"all_gather", "reduce_scatter"}
        gathered = sum(call.sent for call in step if call.op == "all_gather")
        scattered = sum(call.sent for call in step if call.op == "reduce_scatter")
        assert scattered == GRADIENT_BYTES / 2
        assert gathered in (layers + (GRADIENT_BYTES - layers) / 2, GRADIENT_BYTES)


# --- on_call


def test_on_call_sees_each_call_before_it_is_issued():
    def watched():
        seen = []
        data = torch.arange(4.0)
        with on_call(lambda call, tensor: seen.append((call.op, call.index, tensor.tolist()))):
            dist.all_reduce(data)
            dist.all_reduce(data)
        dist.all_reduce(data)
        return seen

    run = measured(watched)
    assert run.results[0] == [("all_reduce", 0, [0, 1, 2, 3]), ("all_reduce", 1, [0, 2, 4, 6])]


def test_on_call_works_without_the_meter_and_only_in_a_rank():
    def watched():
        seen = []
        with on_call(lambda call, tensor: seen.append(call.op)):
            dist.barrier()
        return seen

    run = measured(watched, meter=False)
    assert run.results == [["barrier"]] * 2 and run.calls == [[], []] and run.memory == []
    with pytest.raises(RuntimeError, match="inside a rank"), on_call(print):
        pass

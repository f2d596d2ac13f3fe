"""The fingerprint of a model's state, and the largest difference between replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardlab import launch
from shardlab.fingerprint import fingerprint, largest_difference


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16))


def test_equal_states_have_equal_fingerprints() -> None:
    assert fingerprint(model()) == fingerprint(model())
    assert len(fingerprint(model())) == 8
    # Where the numbers lie in memory does not count.
    transposed = model()
    transposed[0].weight.data = transposed[0].weight.data.t().contiguous().t()
    assert fingerprint(transposed) == fingerprint(model())


def test_any_change_shows() -> None:
    plain = fingerprint(model())
    for name in model().state_dict():
        changed = model()
        with torch.no_grad():
            changed.state_dict()[name].reshape(-1)[-1:].add_(1)
        assert fingerprint(changed) != plain, name
    zero = model()
    zero[0].bias.data.zero_()
    negative = model()
    negative[0].bias.data.zero_().neg_()
    assert fingerprint(zero) != fingerprint(negative), "0.0 and -0.0 differ in a bit"


def test_no_random_number_is_drawn_and_no_graph_is_made() -> None:
    one = model()
    before = torch.get_rng_state()
    fingerprint(one)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad_fn is None for parameter in one.parameters())


def differences() -> tuple[float, float, float, float]:
    one, rank = model(), dist.get_rank()
    equal = largest_difference(one)
    with torch.no_grad():
        one[0].weight[1, 2] += 0.25 * rank
    weight = largest_difference(one)
    one[1].running_mean += 8.0 * rank
    buffer = largest_difference(one)
    one[1].num_batches_tracked += 1000 * rank
    return equal, weight, buffer, largest_difference(one)


def test_largest_difference_is_over_all_pairs_and_alike_on_all_ranks() -> None:
    equal, weight, buffer, count = launch(differences, 3, device="cpu").results[0]
    assert equal == 0
    assert abs(weight - 0.5) < 1e-6, "between ranks 0 and 2"
    assert buffer == count == 16
    results = launch(differences, 3, device="cpu").results
    assert results[0] == results[1] == results[2]

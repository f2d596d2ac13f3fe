"""Lab 08: engines that let go of weights in name only, or too early."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab.communicator import Library
from zoo import wrong
from zoo.zero3_base import ZERO3, Engine, Renewed, Unit


class InNameOnly(Unit):
    def allocate(self):
        pass

    def release(self):
        pass


@wrong(ZERO3, reason="memory", says=r"holds 7\.")
class ForgetsTheStorage(Engine):
    """Parameters become empty; the flat tensor stays."""

    make = InNameOnly


class Abandoned(Renewed):
    def free(self):
        self.old = getattr(self, "old", self.weights)
        super().free()


@wrong(ZERO3, reason="memory", says=r"psi")
class KeepsTheFirstGathering(Engine):
    """New memory for each gathering; the first stays."""

    make = Abandoned


class KeepsShapes(Unit):
    def free(self):
        if self.arriving is not None:
            self.arriving.wait()
        self.arriving, self.whole = None, False
        self.release()


@wrong(ZERO3, reason="memory|crash", says=r"has a shape and no memory")
class ViewsOfNothing(Engine):
    """Storages are emptied, parameters keep their views of them."""

    make = KeepsShapes


class Impatient(Unit):
    def free(self):
        self.arriving, self.whole = None, False
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.release()


@wrong(ZERO3, reason="order", says=r"nobody waits for")
class LetsGoOfWhatIsOnItsWay(Engine):
    """What was fetched in vain is freed without a wait."""

    make = Impatient

    def forward_begins(self, units, inputs):
        result = super().forward_begins(units, inputs)
        if units[0] is self.buckets[1]:  # fetches what has just been used, and gives it up again
            for unit in self.units:
                if not unit.users and not unit.whole and unit.arriving is None:
                    unit.start(self.communicator)
                    unit.free()
                    break
        return result


class Unwritten(Unit):
    def fill(self):
        if dist.get_world_size() > 1:
            self.weights[self.mine].zero_()


@wrong(ZERO3, reason="values", says=r"after construction(?s:.*)puts its own part in its place")
class OwnPartNotWritten(Engine):
    """The own part is not in the flat tensor when it is gathered."""

    make = Unwritten


@wrong(ZERO3, reason="crash", says=r"freed weights")
class NotAgain(Engine):
    """Backward gathers nothing."""

    def backward_begins(self, run):
        pass


@wrong(ZERO3, reason="calls", says=r"go round the communicator(?s:.*)all_gather")
class GathersByItself(Engine):
    """Weights do not go through the communicator."""

    class make(Unit):  # noqa: N801
        def fetch(self, communicator):
            return Library().all_gather(self.weights)

"""Lab 05: the parameters for which buckets are planned, and what is wrong with a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .notes import Finding, Judged, Prepared

F16, F32, F64 = torch.float16, torch.float32, torch.float64
Spec = tuple[int, torch.dtype]  # elements, dtype
UNLIMITED = 10**12


@dataclass(frozen=True)
class PlanCase:
    """specs: of the parameters, in the order in which their gradients are expected."""

    about: str
    specs: tuple[Spec, ...]
    bucket_bytes: int

    @property
    def name(self) -> str:
        return self.about

    def prepare(self, rank: int, world_size: int) -> Prepared:
        parameters = [nn.Parameter(torch.zeros(_shape(count), dtype=dtype)) for count, dtype in self.specs]
        handed = list(parameters)

        def judge(returned: Any) -> Judged:
            if len(parameters) != len(handed) or any(a is not b for a, b in zip(parameters, handed, strict=True)):
                said = "the list that was handed in has changed"
                return Judged(Finding(said, "a plan; the list stays as it is", "make a list of your own"), "")
            return Judged(self.finding(returned), "")

        return Prepared((parameters, self.bucket_bytes), judge, lambda: None)

    def finding(self, returned: Any) -> Finding | None:
        plan, finding = _read(returned)
        return finding or self._judge(plan)

    def _nbytes(self, index: int) -> int:
        count, dtype = self.specs[index]
        return count * dtype.itemsize

    def _judge(self, plan: list[list[int]]) -> Finding | None:
        count = len(self.specs)
        indices = [index for bucket in plan for index in bucket]
        strange = [index for index in indices if not 0 <= index < count]
        if strange:
            return Finding(f"index {strange[0]} in {shown(plan)}", f"indices from 0 to {count - 1}")
        missing = sorted(set(range(count)) - set(indices))
        if missing:
            look = "the last bucket, which nothing closes, full or not, must be kept too"
            return Finding(f"parameter {missing[0]} is in no bucket: {shown(plan)}", "every index once", look)
        twice = sorted({index for index in indices if indices.count(index) > 1})
        if twice:
            return Finding(f"parameter {twice[0]} is in two buckets: {shown(plan)}", "every index once")
        if any(not bucket for bucket in plan):
            look = "when the very first parameter does not fit, there is nothing to close yet"
            return Finding(f"an empty bucket: {shown(plan)}", "buckets with parameters in them", look)
        return self._buckets(plan) or self._order(plan)

    def _buckets(self, plan: list[list[int]]) -> Finding | None:
        for bucket in plan:
            dtypes = {self.specs[index][1] for index in bucket}
            if len(dtypes) > 1:
                told = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                return Finding(f"bucket {bucket} holds {told}", "one dtype in a bucket: it is one flat tensor")
            if bucket != sorted(bucket):
                return Finding(f"bucket {bucket}", "indices in the order of the list")
            held = sum(map(self._nbytes, bucket))
            if len(bucket) > 1 and held > self.bucket_bytes:
                seen = f"bucket {bucket} holds {held} bytes"
                return Finding(
                    seen,
                    f"at most {self.bucket_bytes}, or one parameter that is larger on its own",
                    self._full(bucket, plan),
                )
        return None

    def _order(self, plan: list[list[int]]) -> Finding | None:
        for dtype in dict.fromkeys(dtype for _, dtype in self.specs):
            own = [bucket for bucket in plan if self.specs[bucket[0]][1] is dtype]
            by_first = sorted(own)
            for earlier, later in zip(by_first, by_first[1:], strict=False):
                if earlier[-1] > later[0]:
                    return Finding(
                        f"buckets {earlier} and {later} overlap", "filled front to back, in the order of the list"
                    )
                held = sum(map(self._nbytes, earlier))
                if held + self._nbytes(later[0]) <= self.bucket_bytes:
                    told = str(dtype).removeprefix("torch.")
                    room = f"bucket {earlier} holds {held} of {self.bucket_bytes} bytes ({told})"
                    said = f"{room}, and parameter {later[0]} ({self._nbytes(later[0])} bytes) is in the next"
                    look = "exactly full is allowed" if held + self._nbytes(later[0]) == self.bucket_bytes else ""
                    if not look and self._interrupted(earlier, later):
                        look = "a parameter of another dtype between the two does not close the bucket"
                    return Finding(said, "a bucket is closed when the next one of its dtype does not fit", look)
        if plan != sorted(plan, key=lambda bucket: bucket[-1]):
            look = "reductions leave in this order: a bucket that fills early must not stand behind one that fills late"
            return Finding(f"the buckets come as {shown(plan)}", "in the order of their last indices", look)
        return None

    def _interrupted(self, earlier: list[int], later: list[int]) -> bool:
        return later[0] - earlier[-1] > 1

    def _full(self, bucket: list[int], plan: list[list[int]]) -> str:
        """What to look at when a bucket holds too much."""
        sizes = [self._nbytes(index) for index in bucket]
        if any(size > self.bucket_bytes for size in sizes[:-1]):
            return "after a large one, close too: it has a bucket to itself"
        if self._when_reached(plan):
            return "the bucket is closed once its size is reached or passed: test before you add"
        return "numel() counts elements, element_size() their bytes" if self._in_elements(plan) else ""

    def _when_reached(self, plan: list[list[int]]) -> bool:
        """Whether every bucket but the last of its dtype is too small without its last parameter, and not with it."""
        last = {self.specs[bucket[0]][1]: bucket for bucket in plan}
        for bucket in plan:
            sizes = [self._nbytes(index) for index in bucket]
            if sum(sizes[:-1]) >= self.bucket_bytes:
                return False
            if sum(sizes) < self.bucket_bytes and bucket is not last[self.specs[bucket[0]][1]]:
                return False
        return True

    def _in_elements(self, plan: list[list[int]]) -> bool:
        return all(sum(self.specs[index][0] for index in bucket) <= self.bucket_bytes for bucket in plan)


def _shape(count: int) -> tuple[int, ...]:
    return (count // 2, 2) if count % 2 == 0 and count else (count,)


def shown(plan: Sequence[Sequence[int]]) -> str:
    text = str([list(bucket) for bucket in plan])
    return text if len(text) < 90 else f"{text[:87]}..."


def _read(returned: Any) -> tuple[list[list[int]], Finding | None]:
    expected = "a list of lists of indices, such as [[0, 1], [2]]"
    if returned is None:
        return [], Finding("it returns None", expected, "is there a return at the end?")
    if isinstance(returned, Iterator):
        said = f"it returns a {type(returned).__name__}, which can be gone through only once"
        return [], Finding(said, expected, "list(...) makes a list of it")
    try:
        buckets = [list(bucket) for bucket in returned]
    except TypeError:
        return [], Finding(f"it returns {_short(returned)}", expected)
    for bucket in buckets:
        for index in bucket:
            if isinstance(index, torch.Tensor) and index.numel() != 1:
                return [], Finding("the buckets hold parameters", expected, "enumerate(parameters) gives the indices")
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                return [], Finding(f"a bucket holds {_short(index)}", expected)
    return [[int(index) for index in bucket] for bucket in buckets], None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


def plan_cases() -> list[PlanCase]:
    """The simplest first."""

    def singles(*counts: int) -> tuple[Spec, ...]:
        return tuple((count, F32) for count in counts)

    mixed: tuple[Spec, ...] = ((4, F32), (4, F64), (4, F32), (8, F16), (4, F64), (2, F32), (8, F16), (8, F16))
    late: tuple[Spec, ...] = ((2, F32), (2, F64), (2, F64), (2, F64), (2, F32))
    generator = torch.Generator().manual_seed(5)
    many = torch.randint(1, 60, (60,), generator=generator).tolist()
    kinds = torch.randint(0, 3, (60,), generator=generator).tolist()
    return [
        PlanCase("5 float32 parameters of 40 bytes, buckets of 100", singles(10, 10, 10, 10, 10), 100),
        PlanCase("6 parameters that fill buckets of 80 bytes exactly", singles(10, 10, 20, 5, 5, 10), 80),
        PlanCase("sizes that differ, buckets of 64 bytes", singles(3, 8, 6, 1, 12, 4, 4, 9, 2), 64),
        PlanCase("a small one after one that did not fit", singles(10, 15, 2, 2), 64),
        PlanCase("a parameter larger than a bucket between small ones", singles(2, 100, 2, 2), 40),
        PlanCase("a parameter larger than a bucket comes first", singles(100, 2, 2), 40),
        PlanCase("a parameter larger than a bucket comes last", singles(2, 2, 100), 40),
        PlanCase("a bucket larger than the model", singles(10, 20, 30), UNLIMITED),
        PlanCase("one parameter", singles(7), 1000),
        PlanCase("no parameters", (), 1000),
        PlanCase("a bucket of one byte", singles(3, 4, 5), 1),
        PlanCase("a bucket of 0 bytes", singles(3, 4, 5), 0),
        PlanCase("a bucket of -1 bytes", singles(3, 4, 5), -1),
        PlanCase("float32 and float64 by turns", ((4, F32), (4, F64), (4, F32), (4, F64)), 64),
        PlanCase("float32, float64 and float16 by turns", mixed, 32),
        PlanCase("a bucket that begins first and is complete last", late, 48),
        PlanCase("an empty parameter and a number among others", singles(4, 0, 1, 12, 0, 3), 64),
        PlanCase(
            "60 parameters of three dtypes",
            tuple((c, (F16, F32, F64)[k]) for c, k in zip(many, kinds, strict=True)),
            256,
        ),
    ]

"""Lab 05: plans of buckets, right and wrong."""

from __future__ import annotations

import torch

from zoo import right, wrong
from zoo.overlap_base import planned

PLAN = "05.plan_buckets"


def nbytes(parameter):
    return parameter.numel() * parameter.element_size()


@right(PLAN)
def plain(parameters, bucket_bytes):
    """One open bucket for each dtype."""
    return planned(parameters, bucket_bytes)


@right(PLAN)
def by_dtype(parameters, bucket_bytes):
    """Plans each dtype for itself, then puts the buckets in order."""
    plan = []
    for dtype in {parameter.dtype for parameter in parameters}:
        held = None
        for index, parameter in enumerate(parameters):
            if parameter.dtype != dtype:
                continue
            if held is None or held + nbytes(parameter) > bucket_bytes:
                plan.append([])
                held = 0
            plan[-1].append(index)
            held += nbytes(parameter)
    return sorted(plan, key=max)


@right(PLAN)
def tuples(parameters, bucket_bytes):
    """A tuple of tuples."""
    return tuple(tuple(bucket) for bucket in planned(parameters, bucket_bytes))


@wrong(PLAN, reason="signature", says=r"generator")
def a_generator(parameters, bucket_bytes):
    """Yields the buckets."""
    yield from planned(parameters, bucket_bytes)


@wrong(PLAN, reason="signature|values", says=r"returns a map, which can be gone through only once")
def a_map(parameters, bucket_bytes):
    """An iterator instead of a list."""
    return map(list, planned(parameters, bucket_bytes))


@wrong(PLAN, reason="values", says=r"after a large one, close too")
def a_large_one_takes_company(parameters, bucket_bytes):
    """A large one opens a bucket, and small ones follow it."""
    plan, held = [], {}
    for index, parameter in enumerate(parameters):
        size, (bucket, total) = nbytes(parameter), held.get(parameter.dtype, (None, 0))
        alone = bucket is not None and len(bucket) == 1 and total > bucket_bytes > size
        if bucket is None or (total + size > bucket_bytes and not alone):
            bucket, total = [], 0
            plan.append(bucket)
        bucket.append(index)
        held[parameter.dtype] = bucket, total + size
    return sorted(plan, key=lambda one: one[-1])


@right(PLAN)
def tensors_of_indices(parameters, bucket_bytes):
    """Indices in tensors, as torch's own functions give them."""
    return [torch.tensor(bucket) for bucket in planned(parameters, bucket_bytes)]


@right(PLAN)
def tuples_of_indices(parameters, bucket_bytes):
    """A tuple for each bucket: nobody adds to it any more."""
    return [tuple(bucket) for bucket in planned(parameters, bucket_bytes)]


@right(PLAN)
def closes_when_full(parameters, bucket_bytes):
    """Closes a bucket when the next one of its dtype comes and does not fit; what is open at the end follows."""
    closed, open_ones, held = [], {}, {}
    for index, parameter in enumerate(parameters):
        kind, size = parameter.dtype, parameter.nbytes
        if kind in open_ones and held[kind] + size > bucket_bytes:
            closed.append(open_ones.pop(kind))
        if kind not in open_ones:
            open_ones[kind], held[kind] = [], 0
        open_ones[kind].append(index)
        held[kind] += size
    closed.extend(open_ones.values())
    closed.sort(key=lambda bucket: bucket[-1])
    return closed


@right(PLAN)
def recursive(parameters, bucket_bytes):
    """The first bucket of the first dtype, then the rest."""

    def plan(indices):
        if not indices:
            return []
        taken, total = [], 0
        for index in (i for i in indices if parameters[i].dtype == parameters[indices[0]].dtype):
            if taken and total + nbytes(parameters[index]) > bucket_bytes:
                break
            taken.append(index)
            total += nbytes(parameters[index])
        return [taken, *plan([index for index in indices if index not in taken])]

    return sorted(plan(list(range(len(parameters)))), key=lambda bucket: bucket[-1])


@wrong(PLAN, reason="values", says=r"is in no bucket")
def loses_the_last(parameters, bucket_bytes):
    """The bucket that is open at the end is forgotten."""
    plan, bucket, held = [], [], 0
    for index, parameter in enumerate(parameters):
        if bucket and held + nbytes(parameter) > bucket_bytes:
            plan.append(bucket)
            bucket, held = [], 0
        bucket.append(index)
        held += nbytes(parameter)
    return plan


@wrong(PLAN, reason="values", says=r"holds float32 and float64")
def mixes_dtypes(parameters, bucket_bytes):
    """One bucket is open at a time, whatever the dtype."""
    plan, held = [], bucket_bytes + 1
    for index, parameter in enumerate(parameters):
        if not plan or held + nbytes(parameter) > bucket_bytes:
            plan.append([])
            held = 0
        plan[-1].append(index)
        held += nbytes(parameter)
    return plan


@wrong(PLAN, reason="values", says=r"another dtype between the two")
def another_dtype_closes(parameters, bucket_bytes):
    """A change of dtype closes the bucket: many small ones where dtypes alternate."""
    plan, held = [], 0
    for index, parameter in enumerate(parameters):
        same = plan and parameters[plan[-1][0]].dtype == parameter.dtype
        if not same or held + nbytes(parameter) > bucket_bytes:
            plan.append([])
            held = 0
        plan[-1].append(index)
        held += nbytes(parameter)
    return plan


@wrong(PLAN, reason="values", says=r"holds \d+ bytes[\s\S]*element_size")
def counts_elements(parameters, bucket_bytes):
    """Elements instead of bytes."""
    plan, held = [], 0
    for index, parameter in enumerate(parameters):
        if not plan or held + parameter.numel() > bucket_bytes:
            plan.append([])
            held = 0
        plan[-1].append(index)
        held += parameter.numel()
    return plan


@wrong(PLAN, reason="values", says=r"exactly full is allowed")
def never_quite_full(parameters, bucket_bytes):
    """>= instead of >."""
    return planned(parameters, bucket_bytes - 1)


@wrong(PLAN, reason="values", says=r"holds \d+ bytes[\s\S]*test before you add")
def closes_one_too_late(parameters, bucket_bytes):
    """Closes a bucket after the parameter that made it too large."""
    plan, held = [[]], 0
    for index, parameter in enumerate(parameters):
        plan[-1].append(index)
        held += nbytes(parameter)
        if held >= bucket_bytes:
            plan.append([])
            held = 0
    return [bucket for bucket in plan if bucket]


@wrong(PLAN, reason="values", says=r"an empty bucket")
def an_empty_bucket(parameters, bucket_bytes):
    """When the first parameter is too large, the empty bucket before it is kept."""
    plan, held = [[]], 0
    for index, parameter in enumerate(parameters):
        if held + nbytes(parameter) > bucket_bytes:
            plan.append([])
            held = 0
        plan[-1].append(index)
        held += nbytes(parameter)
    return plan if parameters else []


@wrong(PLAN, reason="values", says=r"in the order of their last indices")
def by_first_index(parameters, bucket_bytes):
    """In the order in which buckets are begun."""
    return sorted(planned(parameters, bucket_bytes))


@wrong(PLAN, reason="values", says=r"in the order of their last indices|in the order of the list")
def last_bucket_first(parameters, bucket_bytes):
    """The buckets of a plan from the last parameter to the first."""
    count = len(parameters)
    plan = planned(parameters[::-1], bucket_bytes)
    return [[count - 1 - index for index in bucket] for bucket in plan]


@wrong(PLAN, reason="values", says=r"overlap|is in the next")
def best_fit(parameters, bucket_bytes):
    """Any bucket with room takes the next one: fuller buckets, that are complete later."""
    plan, held = [], []
    for index, parameter in enumerate(parameters):
        for number, bucket in enumerate(plan):
            if parameters[bucket[0]].dtype == parameter.dtype and held[number] + nbytes(parameter) <= bucket_bytes:
                bucket.append(index)
                held[number] += nbytes(parameter)
                break
        else:
            plan.append([index])
            held.append(nbytes(parameter))
    return sorted(plan, key=lambda bucket: bucket[-1])


@wrong(PLAN, reason="values", says=r"is in the next|holds 120 bytes")
def equal_counts(parameters, bucket_bytes):
    """Buckets of equally many parameters."""
    total = sum(map(nbytes, parameters))
    count = max(1, -(-total // bucket_bytes)) if bucket_bytes > 0 else len(parameters)
    size = -(-len(parameters) // count)
    indices = list(range(len(parameters)))
    return [indices[start : start + size] for start in range(0, len(indices), max(1, size))]


@wrong(PLAN, reason="values", says=r"parameter 1 is in no bucket")
def leaves_out_large_ones(parameters, bucket_bytes):
    """A parameter that is larger than a bucket is skipped."""
    small = [index for index, parameter in enumerate(parameters) if nbytes(parameter) <= max(bucket_bytes, 16)]
    plan = planned([parameters[index] for index in small], bucket_bytes)
    return [[small[index] for index in bucket] for bucket in plan]


@wrong(PLAN, reason="values", says=r"is in the next|two buckets|holds \d+ bytes")
def cuts_large_ones(parameters, bucket_bytes):
    """A parameter that does not fit is divided among two buckets."""
    plan, held = [[]], 0
    for index, parameter in enumerate(parameters):
        plan[-1].append(index)
        held += nbytes(parameter)
        if held > bucket_bytes:
            plan.append([index])
            held -= bucket_bytes
    return plan


@wrong(PLAN, reason="values", says=r"the buckets hold parameters")
def parameters_themselves(parameters, bucket_bytes):
    """Parameters instead of indices."""
    return [[parameters[index] for index in bucket] for bucket in planned(parameters, bucket_bytes)]


@wrong(PLAN, reason="values", says=r"it returns None")
def returns_nothing(parameters, bucket_bytes):
    """The return is missing."""
    planned(parameters, bucket_bytes)


@wrong(PLAN, reason="crash", says=r"no parameters")
def needs_a_parameter(parameters, bucket_bytes):
    """Looks at the first parameter before it looks whether there is one."""
    parameters[0]
    return planned(parameters, bucket_bytes)


@wrong(PLAN, reason="crash", says=r"0 bytes")
def divides_by_the_size(parameters, bucket_bytes):
    """A share of the bucket is computed for each parameter."""
    for parameter in parameters:
        nbytes(parameter) / bucket_bytes
    return planned(parameters, bucket_bytes)


@wrong(PLAN, reason="values", says=r"has changed")
def eats_the_list(parameters, bucket_bytes):
    """Takes parameters off the list that was handed in."""
    plan = planned(parameters, bucket_bytes)
    while parameters:
        parameters.pop()
    return plan


@wrong(PLAN, reason="not written", says=r"not written yet")
def not_written(parameters, bucket_bytes):
    """The stub as it is handed out."""
    raise NotImplementedError()

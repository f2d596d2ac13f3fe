"""Lab 02: checks of DataParallel in one process.

Everything runs in one fresh process with five logical devices (a case uses some of them, not always in order), so that
a check says the same on every machine. Looked at: on which device every result lives, values, the bytes of every
device, how many replicas are at work at the same time, what is held afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ..errors import CheckFailed
from ..records import Where
from . import exercise
from .data_parallel_backward import backward_cases
from .data_parallel_forward import forward_cases
from .data_parallel_pieces import gather_cases, scatter_cases
from .device_trial import try_cases
from .observe import check_signature, line_at

HANDED = "the devices are handed in; nothing else is needed"


@exercise("02.scatter", title="Scatter a batch")
def probe_scatter(solution: Callable) -> str:
    check_signature("02.scatter", solution, ["tensor", "devices"], HANDED)
    cases = scatter_cases()
    facts, printed = try_cases("02.scatter", solution, cases)
    return _verdict(
        f"  values: every row once, in order, on its device, in {len(cases)} cases, N = 1 to 5",
        f"  bytes: each device received its piece and nothing else, {sum(facts['sent']):,} bytes in all",
        printed=printed,
    )


@exercise("02.gather", title="Gather the pieces")
def probe_gather(solution: Callable) -> str:
    check_signature("02.gather", solution, ["pieces", "device"], HANDED)
    cases = gather_cases()
    facts, printed = try_cases("02.gather", solution, cases)
    return _verdict(
        f"  values: the pieces in order, also empty ones, on the device, in {len(cases)} cases, N = 1 to 4",
        f"  bytes: each piece once, straight to the device, {sum(facts['sent']):,} bytes in all",
        printed=printed,
    )


@exercise("02.DataParallel", title="DataParallel")
def probe_data_parallel(solution: Callable) -> str:
    if isinstance(solution, type):
        _check_self(solution, "__init__", ["module", "devices"])
    check_signature("02.DataParallel", solution, ["module", "devices"], HANDED)
    expected = "a class: DataParallel(module, devices), with __call__(inputs) and forward_backward(...)"
    if not isinstance(solution, type):
        raise CheckFailed("02.DataParallel", "signature", f"a {type(solution).__name__}", expected)
    for method, arguments in _METHODS.items():
        if not any(method in vars(each) for each in solution.__mro__):
            raise CheckFailed("02.DataParallel", "signature", f"the class has no {method}", expected)
        _check_self(solution, method, arguments)
    cases = [*forward_cases(), *backward_cases()]
    facts, printed = try_cases("02.DataParallel", solution, cases)
    psi = facts["psi"]
    received, sent = facts["bytes 4"]
    moved = f"{received / psi:.2f} psi and sent {sent / psi:.2f} psi"
    return _verdict(
        f"  values: outputs, loss and .grad are those of one device, in {len(cases)} cases, N = 1 to 5",
        "  threads: forward and backward of all replicas at the same time, each on its device",
        f"  bytes, N = 4: device 0 received {moved}, with the batch and the losses",
        printed=printed,
    )


_METHODS = {"__call__": ["inputs"], "forward_backward": ["inputs", "targets", "loss_function"]}


def _check_self(solution: type, method: str, arguments: list[str]) -> None:
    """Raises CheckFailed("signature") when a method can't be called with these arguments after `self`."""
    function = inspect.getattr_static(solution, method)
    if not inspect.isfunction(function):
        return
    signature, code = inspect.signature(function), function.__code__
    try:
        signature.bind("self", *arguments)
    except TypeError:
        expected = f"def {method}(self, {', '.join(arguments)})"
        look = line_at(Where(code.co_filename, code.co_firstlineno, method))
        raise CheckFailed("02.DataParallel", "signature", f"{method}{signature}", expected, look) from None


def _verdict(*lines: str, printed: int) -> str:
    more = (
        [f"  your function printed {printed:,} line{'s' * (printed > 1)}; they are not shown here"] if printed else []
    )
    return "\n".join([*lines, *more])

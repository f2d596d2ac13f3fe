"""Reading alpha and beta off measured times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardlab.errors import UsageError
from shardlab.theory.arguments import real, whole


class AlphaBeta(NamedTuple):
    """alpha: seconds per message. beta: seconds per byte."""

    alpha: float
    beta: float


def fit_alpha_beta(points: Iterable[tuple[int, float, float]]) -> AlphaBeta:
    """The alpha and beta, neither negative, that explain measured times best.

    Each point is (steps, bytes per step, seconds in all), for seconds = steps (alpha + beta bytes); a ring all-reduce
    of n bytes has 2(N-1) steps of n/N bytes. Minimised is the sum of squared relative errors: plain least squares would
    look at the largest sizes only, and alpha shows in the smallest.

    Raises UsageError when the points cannot tell alpha from beta: at least two sizes per step that differ are needed.
    """
    try:
        rows = [(steps, nbytes, seconds) for steps, nbytes, seconds in points]
    except (TypeError, ValueError):
        raise UsageError("points must be a list of (steps, bytes per step, seconds)") from None
    checked = [
        (whole("steps", steps, least=1), real("bytes per step", nbytes), real("seconds", seconds, above_zero=True))
        for steps, nbytes, seconds in rows
    ]
    largest = max((nbytes for _, nbytes, _ in checked), default=0.0)
    if largest == 0:
        raise UsageError("fit_alpha_beta needs points at two or more sizes; got none above 0 bytes")

    # Divided by its own time, each point becomes the equation 1 = a alpha + b (beta largest): errors are relative, and
    # both unknowns are of one order of magnitude, which keeps the 2x2 normal equations well conditioned.
    scaled = [(steps / seconds, steps / seconds * (nbytes / largest)) for steps, nbytes, seconds in checked]
    aa, ab, bb = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        sizes = sorted({nbytes for _, nbytes, _ in checked})
        raise UsageError(
            f"fit_alpha_beta needs points at two or more clearly different sizes; got {sizes} bytes per step"
        )
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    # The error is a convex bowl: if its lowest point lies beyond an axis, the lowest allowed one is on that axis.
    if alpha < 0:
        alpha, beta = 0.0, b1 / bb
    elif beta < 0:
        alpha, beta = a1 / aa, 0.0
    return AlphaBeta(alpha, beta / largest)

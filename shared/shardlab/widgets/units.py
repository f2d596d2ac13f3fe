"""Numbers for people, and numbers from people."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# The longest first, so that "MiB" is not read as "B" after an unknown word.
SUFFIX = re.compile(r"(?<=[\d.)\s])\s*(?P<prefix>Ki|Mi|Gi|Ti|k|K|M|G|T|)(?P<unit>bytes|byte|B|elements|)\s*$")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")
TIMES = re.compile(r"(?<=[\d)])\s*[xX]\s*(?=[\d(])|(?<=[\w)])\s+[xX]\s+(?=[\w(])")  # 5 x 4, 5x4, N x 4

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LARGEST = 1e30


def number_text(value: float) -> str:
    """A number as a reader wants it: whole numbers in full (3,145,728), others with four significant digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def parse_number(text: str, names: Mapping[str, float] | None = None) -> float:
    """The number a person meant: 3_145_728, 3,145,728, 3e6, "3 MB", "3 MiB", 2*3/4*4e6, 2*(N-1)/N*n with `names`.

    A multiplication sign before a name or a parenthesis may be left out: 2(N-1)/N n. It can be an x: 5 x 4.

    kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024. Raises ValueError with a sentence for the
    person who typed it.
    """
    cleaned = THOUSANDS.sub("", text.strip()).replace("×", "*").replace("−", "-")
    if not cleaned:
        raise ValueError("nothing typed yet")
    if "^" in cleaned:
        raise ValueError("write a power as 2**20")
    names = dict(names or {})
    if "x" not in names and "X" not in names:
        cleaned = TIMES.sub("*", cleaned)
    scale = 1
    match = None if cleaned in names else SUFFIX.search(cleaned)
    if match and match.group().strip():
        scale = {**DECIMAL, "K": 1000, **BINARY}[match["prefix"]]
        cleaned = cleaned[: match.start()]
    cleaned = _with_all_signs(cleaned, names)
    try:
        value = _evaluate(ast.parse(cleaned.strip(), mode="eval").body, names) * scale
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"cannot read {text.strip()!r} as a number") from None
    except ZeroDivisionError:
        raise ValueError("this divides by zero") from None
    except OverflowError:
        raise ValueError("this number is too large") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ValueError("this number is too large")
    return int(value) if float(value).is_integer() else value


def _with_all_signs(text: str, names: Mapping[str, float]) -> str:
    """Writes out the multiplications that formulas leave out: 3n, (N-1)n, N (N-1), n n."""
    known = "".join(rf"|{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"([\d)]{known.replace('|', '|(?<![A-Za-z_])')})\s*(?=\({known})", r"\1*", text)


def _evaluate(node: ast.expr, names: Mapping[str, float]) -> float:
    """Arithmetic on numbers and known names; anything else is refused, so that nothing typed is ever run."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            known = ", ".join(names)
            raise ValueError(f"does not know {name!r}" + (f"; names you can use: {known}" if known else ""))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _evaluate(left, names), _evaluate(right, names)
            if isinstance(op, ast.Pow) and (abs(b) > 100 or (a < 0 and not float(b).is_integer())):
                raise ValueError("this power is too large or has no real value")
            return OPERATORS[type(op)](a, b)
    raise ValueError("only numbers and + - * / ** ( ) can be used here")

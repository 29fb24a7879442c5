"""The constants of a kernel's text: `struct Tile` evaluated as in C++ for a head dimension, and the parts of shared memory."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Mapping

# Of shared memory: each a constant that says where the part begins
PARTS = ("K", "V", "Q", "dO", "dS", "dQ", "LSE", "delta", "barriers")
SMEM_LIMIT = 227 * 1024  # bytes of a CTA (CUDA C++ Programming Guide, "Compute Capabilities", 9.0)


def constants(source: str, d: int, **given: int) -> dict[str, int]:
    """The numbers in `struct Tile` of a kernel's text for head dimension d on a Hopper GPU, in the order in which they stand there.

        constants(rung("33_backward_wgmma").source, 64)["Br"]

    given: values that replace those in the text; what depends on them changes too. ValueError where there is no such struct,
    or where an expression is not one of whole numbers.
    """
    found = re.search(r"struct Tile \{\n(.*?)\n\};", source, re.DOTALL)
    if not found:
        raise ValueError("the text has no struct Tile")
    values, of_gpu = {"d": d}, {"FA_SMEM_KB": SMEM_LIMIT // 1024}  # of fa/arch.cuh
    for declared in re.findall(r"static constexpr int ([^;]+);", re.sub(r"//.*", "", found[1])):
        for each in declared.split(","):
            name, expression = (part.strip() for part in each.split("=", 1))
            values[name] = given[name] if name in given else evaluate(expression, values | of_gpu)
    return values


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """A C++ expression of whole numbers: + - * / %, comparisons, ! && || and ?: of literals and `values`.

    ValueError for anything else, for a name that has no value and for a division by 0.
    """
    tokens = re.findall(r"\w+|&&|\|\||[<>=!]=|\S", expression)
    try:
        value = _conditional(tokens, values)()
        if tokens:
            raise ValueError(f"{tokens[0]!r} is one too many")
        return value
    except KeyError as error:
        raise ValueError(f"{expression!r}: {error} has no value") from None
    except IndexError:
        raise ValueError(f"{expression!r} is not an expression of whole numbers: it ends too early") from None
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} is not an expression of whole numbers: {error}") from None


def _quotient(a: int, b: int) -> int:
    """Division as in C++: towards zero."""
    return -(-a // b) if (a < 0) != (b < 0) else a // b


# Operators of two operands, those that bind weakest first. What stands right of && and || is a function.
_LEVELS: tuple[dict[str, Callable], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b()))},
    {"&&": lambda a, b: int(bool(a) and bool(b()))},
    {"==": lambda a, b: int(a == b()), "!=": lambda a, b: int(a != b())},
    {
        "<": lambda a, b: int(a < b()),
        "<=": lambda a, b: int(a <= b()),
        ">": lambda a, b: int(a > b()),
        ">=": lambda a, b: int(a >= b()),
    },
    {"+": lambda a, b: a + b(), "-": lambda a, b: a - b()},
    {
        "*": lambda a, b: a * b(),
        "/": lambda a, b: _quotient(a, b()),
        "%": lambda a, b: a - b() * _quotient(a, b()),
    },
)
_UNARY = {"!": lambda a: int(not a), "-": operator.neg, "+": operator.pos}

Lazy = Callable[[], int]  # evaluated where it counts alone: d ? n / d : 0


def _conditional(tokens: list[str], values: Mapping[str, int]) -> Lazy:
    """Takes `a ? b : c`, or what binds closer, from the front of `tokens`."""
    condition = _binary(tokens, values, 0)
    if not tokens or tokens[0] != "?":
        return condition
    tokens.pop(0)
    yes = _conditional(tokens, values)
    _expect(tokens, ":")
    no = _conditional(tokens, values)
    return lambda: yes() if condition() else no()


def _binary(tokens: list[str], values: Mapping[str, int], level: int) -> Lazy:
    if level == len(_LEVELS):
        return _operand(tokens, values)
    left = _binary(tokens, values, level + 1)
    while tokens and tokens[0] in _LEVELS[level]:
        apply, right = _LEVELS[level][tokens.pop(0)], _binary(tokens, values, level + 1)
        left = functools.partial(lambda apply, left, right: apply(left(), right), apply, left, right)
    return left


def _operand(tokens: list[str], values: Mapping[str, int]) -> Lazy:
    token = tokens.pop(0)
    if token in _UNARY:
        inner = _operand(tokens, values)
        return lambda: _UNARY[token](inner())
    if token == "(":
        inner = _conditional(tokens, values)
        _expect(tokens, ")")
        return inner
    if token.isidentifier():
        return lambda: values[token]
    number = int(token, 0)
    return lambda: number


def _expect(tokens: list[str], wanted: str) -> None:
    if tokens.pop(0) != wanted:
        raise ValueError(f"{wanted!r} is missing")


def parts(values: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each part of shared memory, from where the next one begins; the last ends at `smem_bytes`."""
    places = sorted((values[name], name) for name in PARTS if name in values)
    ends = [begin for begin, _ in places[1:]] + [values["smem_bytes"]]
    return {name: end - begin for (begin, name), end in zip(places, ends, strict=True)}


# A product of a kernel's text, and the for loop that it is in: what it adds to; start_S() is a function that adds to S.
_PRODUCT = re.compile(
    r"(?:for \(int \w+ = (?P<begin>[^;]+); \w+ < (?P<end>[^;]+); \+\+\w+\)\s+)?"
    r"(?:fa::)?\b(?:(?:product|wgmma_mma_async<[^>]*>)\(\s*(?P<sum>\w+)_reg\b|start_(?P<started>\w+)\()"
)


def accumulators(source: str, d: int, region: str = "tile_loop") -> list[str]:
    """What the products in a region of a kernel's text add to, in its order: "dP", "dV", "S" ..., each where it stands; a call of
    start_S(), a function of the kernel, stands for S. What is in a loop that has no turn at head dimension d is left out."""
    above, _, text = source.partition(f"// [region: {region}]")
    values = constants(source, d)
    for name, expression in re.findall(r"^  constexpr int (\w+) = ([^;,]+);", above, re.MULTILINE):
        with contextlib.suppress(ValueError):  # of another sort than whole numbers
            values[name] = evaluate(expression, values)
    found = _PRODUCT.finditer(text.partition(f"// [end: {region}]")[0])
    return [x["sum"] or x["started"] for x in found if not x["begin"] or _turns(x, values)]


def _turns(product: re.Match[str], values: Mapping[str, int]) -> bool:
    return evaluate(product["begin"], values) < evaluate(product["end"], values)

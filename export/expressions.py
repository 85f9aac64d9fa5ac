"""torch's symbolic sizes as expressions of the contract: integers, dims, `+ - * //` and parentheses."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import gcd
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv

from ..bundle_format.contract import Dim, evaluate
from ..bundle_format.errors import ContractError, ExportError

Symbols = Mapping[Any, Dim]  # torch's symbol for the size of a dim, divided by its multiple

_MAX_DENOMINATOR = 4096  # of a fraction that a float stands for
_MANY = 2048  # sizes to look at where floats are rounded

_SUM, _PRODUCT, _ATOM = range(3)  # how tightly a text binds


def axis_of(size: Any, symbols: Symbols, what: str) -> int | str:
    """The contract's axis for a traced size (an int or a SymInt); ExportError where it cannot say it."""
    if isinstance(size, int):
        return size
    expression = sympy.sympify(size.node.expr)
    if expression.is_Integer:
        return int(expression)
    if unknown := expression.free_symbols - set(symbols):
        raise ExportError(
            f"{what} depends on the values of a tensor, not on the sizes of the inputs (`{min(map(str, unknown))}`)",
            "return a tensor of a size that the inputs' sizes tell, with a mask or a count for what is valid in it",
        )
    expression = _resolved(expression, symbols)
    try:
        text, _ = _text(expression, symbols)
        agrees = all(evaluate(text, sizes) == value for sizes, value in _samples(expression, symbols))
    except (ContractError, _Inexpressible):
        agrees = False
    if not agrees:
        shown = expression.subs({symbol: sympy.Symbol(dim.name) / dim.multiple for symbol, dim in symbols.items()})
        raise ExportError(
            f"{what} is `{_readable(str(shown))}`, which a contract cannot say", "it can say `+`, `-`, `*` and `//`"
        )
    return text


def _readable(text: str) -> str:
    """Without the names of torch's functions of sizes."""
    for inner, python in (
        ("TruncToInt", "int"),
        ("FloorToInt", "floor"),
        ("CeilToInt", "ceil"),
        ("RoundToInt", "round"),
    ):
        text = text.replace(inner, python)
    return re.sub(r"ToFloat\(([^()]*)\)", r"\1", text)


class _Inexpressible(Exception):
    pass


def _resolved(expression: Any, symbols: Symbols) -> Any:
    """Without `Max` and `Min`, where one of their arguments is the answer over the whole range."""
    for choice in sympy.preorder_traversal(expression):
        pick = {"Max": max, "Min": min}.get(type(choice).__name__)
        if pick is None:
            continue
        points = _points(choice.free_symbols, symbols)
        values = [[_at(argument, point) for argument in choice.args] for point in points]
        for at, argument in enumerate(choice.args):
            if all(row[at] == pick(row) for row in values):
                return _resolved(expression.xreplace({choice: argument}), symbols)
    return expression


def _text(expression: Any, symbols: Symbols) -> tuple[str, int]:
    """The text of an expression, and how tightly it binds."""
    name = type(expression).__name__
    if expression.is_Integer:
        return (str(expression), _ATOM) if expression >= 0 else (str(expression), _SUM)
    if expression in symbols:
        dim = symbols[expression]
        return (dim.name, _ATOM) if dim.multiple == 1 else (f"{dim.name}//{dim.multiple}", _PRODUCT)
    if expression.is_Add:
        return _sum(expression, symbols), _SUM
    if expression.is_Mul:
        return _product(expression, symbols)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return "*".join([_bound(expression.base, symbols, _ATOM)] * int(expression.exp)), _PRODUCT
    if name in ("FloorDiv", "CleanDiv"):
        return _quotient(expression.args[0], expression.args[1], symbols), _PRODUCT
    if name in ("Mod", "PythonMod"):
        left, right = (_bound(argument, symbols, _ATOM) for argument in expression.args)
        return f"{left} - {left}//{right}*{right}", _SUM
    if name in ("floor", "FloorToInt", "TruncToInt"):
        return _text(_whole(_exact(expression.args[0])), symbols)
    if name in ("ceiling", "CeilToInt"):
        return f"-({_text(_whole(-_exact(expression.args[0])), symbols)[0]})", _SUM
    if name == "RoundToInt":  # halves go to the even neighbour, which the samples find
        return _text(_whole(_exact(expression.args[0]) + sympy.Rational(1, 2)), symbols)
    raise _Inexpressible


def _sum(expression: Any, symbols: Symbols) -> str:
    whole = sympy.together(expression)
    numerator, denominator = sympy.fraction(whole)
    if denominator != 1:
        return _quotient(numerator, denominator, symbols)
    terms = []  # (is subtracted, is a number, text), sorted in this order
    for term in expression.args:
        negative = term.could_extract_minus_sign()
        terms.append((negative, bool(term.is_Integer), _bound(-term if negative else term, symbols, _PRODUCT)))
    (negative, _, first), *rest = sorted(terms)
    return ("-" if negative else "") + first + "".join(f" {'-' if less else '+'} {text}" for less, _, text in rest)


def _product(expression: Any, symbols: Symbols) -> tuple[str, int]:
    numerator, denominator = sympy.fraction(expression)
    if denominator != 1:
        return _quotient(numerator, denominator, symbols), _PRODUCT
    coefficient, rest = expression.as_coeff_Mul()
    if coefficient < 0:
        return f"-{_bound(-expression, symbols, _PRODUCT)}", _SUM
    divisor, words = 1, []
    for factor in sympy.Mul.make_args(rest):
        dim = symbols.get(factor)
        if dim is not None and dim.multiple > 1 and divisor == 1:
            shared = gcd(int(coefficient), dim.multiple)  # 6 times the size divided by 4 is 3 times the size over 2
            coefficient, divisor = coefficient // shared, dim.multiple // shared
            words.append(dim.name)
        else:
            words.append(_bound(factor, symbols, _ATOM))
    words = sorted(words, key=lambda word: (not word.isidentifier(), word))
    if coefficient != 1:
        words.insert(0, str(coefficient))
    text = "*".join(words) + (f"//{divisor}" if divisor > 1 else "")
    return text, _PRODUCT if len(words) > 1 or divisor > 1 else _ATOM


def _quotient(left: Any, right: Any, symbols: Symbols) -> str:
    return f"{_bound(left, symbols, _PRODUCT)}//{_bound(right, symbols, _ATOM)}"


def _whole(argument: Any) -> Any:
    """What rounding down makes of a quotient."""
    numerator, denominator = sympy.fraction(sympy.together(argument))
    return FloorDiv(numerator, denominator) if denominator != 1 else argument


def _exact(argument: Any) -> Any:
    """A product or quotient of floats as one of fractions: `1.5*ToFloat(h)` is `3*h/2`. Samples tell if that holds."""
    if argument.is_Float:
        near = Fraction(float(argument)).limit_denominator(_MAX_DENOMINATOR)
        return sympy.Rational(near.numerator, near.denominator)
    if not argument.args:
        return argument
    arguments = [_exact(each) for each in argument.args]
    name = type(argument).__name__
    if name == "ToFloat":
        return arguments[0]
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        return arguments[0] / arguments[1]
    return argument.func(*arguments)


def _bound(expression: Any, symbols: Symbols, tightness: int) -> str:
    text, binds = _text(expression, symbols)
    return text if binds >= tightness else f"({text})"


def _samples(expression: Any, symbols: Symbols) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes of the dims, and the value of the expression for them."""
    floats = any(
        part.is_Float or (part.is_Rational and not part.is_Integer) for part in sympy.preorder_traversal(expression)
    )
    for point in _points(expression.free_symbols, symbols, _MANY if floats else 64):
        sizes = {symbols[symbol].name: unit * symbols[symbol].multiple for symbol, unit in point.items()}
        yield sizes, _at(expression, point)


def _points(free: Sequence[Any], symbols: Symbols, many: int = 64) -> list[dict[Any, int]]:
    """Values of torch's symbols: all of short ranges, else the ends and what lies near them, and some between. `many`:
    how many of a symbol that is alone.
    """
    order = sorted(free, key=str)
    axes = [_steps(symbols[symbol], many if len(order) == 1 else 9) for symbol in order]
    return [dict(zip(order, values, strict=True)) for values in product(*axes)]


def _steps(dim: Dim, count: int) -> list[int]:
    low, high = dim.min // dim.multiple, dim.max // dim.multiple
    if high - low < count:
        return list(range(low, high + 1))
    between = [low + (high - low) * step // (count - 4) for step in range(count - 3)]
    return sorted({*between, low + 1, low + 2, high - 1})


def _at(expression: Any, point: Mapping[Any, int]) -> int:
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in point.items()}))

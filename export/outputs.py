"""Shapes as torch's symbolic expressions, told as expressions of the contract."""

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

from ..bundle_format.contract import Dim, Output
from .naming import dtype_name


def describe_output(name: str, value: Any, symbols: Mapping[sympy.Symbol, Dim]) -> Output:
    """The contract's output for a traced tensor; `symbols` are torch's symbols, each standing for size // multiple."""
    axes = [axis if isinstance(axis, int) else str(_expr(axis, symbols)) for axis in value.shape]
    return Output(name=name, dtype=dtype_name(value.dtype), shape=tuple(axes))


def _expr(axis: Any, symbols: Mapping[sympy.Symbol, Dim]) -> Any:
    e = axis.node.expr
    return e.subs({s: sympy.Symbol(d.name) / d.multiple for s, d in symbols.items()})

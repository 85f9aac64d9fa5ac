"""torch's symbolic sizes as expressions of the contract, compared with what torch's own functions compute."""

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

from mctl.bundle_format.contract import Dim, evaluate
from mctl.bundle_format.errors import ExportError
from mctl.export import expressions
from mctl.export.expressions import axis_of

S, T = sympy.symbols("s0 s1", integer=True, positive=True)
SEQ, WIDE = Dim(name="seq", min=1, max=512), Dim(name="n", min=8, max=64, multiple=4)
SYMBOLS = {S: SEQ, T: WIDE}  # s1 is n // 4


def axis(expression: Any) -> int | str:
    return axis_of(SimpleNamespace(node=SimpleNamespace(expr=expression)), SYMBOLS, "output `y`: axis 0")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (sympy.Integer(7), 7),
        (S, "seq"),
        (2 * S, "2*seq"),
        (2 * S + 1, "2*seq + 1"),
        (S - 1, "seq - 1"),
        (4 * T, "n"),
        (8 * T, "2*n"),
        (T, "n//4"),
        (4 * T + S, "n + seq"),
        (S * 4 * T, "n*seq"),
        (S**2, "seq*seq"),
        (FloorDiv(S - 1, 2) + 1, "(seq - 1)//2 + 1"),
        (FloorDiv(4 * T, 3), "n//3"),
        (Max(1, S), "seq"),
        (Max(2, 4 * T), "n"),
        (Min(1024, S), "seq"),
        (10 - S + 600, "610 - seq"),
        (TruncToInt(1.5 * ToFloat(S)), "3*seq//2"),
        (TruncToInt(ToFloat(S) * (1 / 3)), "seq//3"),
        (TruncToInt(2.5 * ToFloat(4 * T)), "5*n//2"),
        (CeilToInt(0.5 * ToFloat(S)) + 1, "(-((-seq)//2)) + 1"),
        (FloorToInt(IntTrueDiv(3 * S, 4)), "3*seq//4"),
        (6 * T, "3*n//2"),
        (2 * T * S, "n*seq//2"),
    ],
)
def test_forms(expression: Any, text: str) -> None:
    assert axis(expression) == text


@pytest.mark.parametrize("expression", [TruncToInt(0.29 * ToFloat(S)), RoundToInt(0.5 * ToFloat(S))])
def test_what_rounding_makes_of_floats_is_no_fraction(expression: Any) -> None:
    """0.29 * 100 is 28.999999999999996 in floats, and round(0.5) is 0, not 1."""
    with pytest.raises(ExportError, match=r"is `(int\(0.29|round\(0.5)\*seq\)`, which a contract cannot say"):
        axis(expression)


def test_an_int_stays_one() -> None:
    assert axis_of(7, SYMBOLS, "output `y`: axis 0") == 7


numbers = st.integers(1, 9).map(sympy.Integer)


def _combined(inner: Any) -> Any:
    return (
        st.builds(lambda a, b: a + b, inner, inner)
        | st.builds(lambda a, b: a - b, inner, inner)
        | st.builds(lambda a, b: a * b, inner, inner)
        | st.builds(FloorDiv, inner, numbers)
        | st.builds(lambda a, b: CleanDiv(a * b, b), inner, numbers)
        | st.builds(Mod, st.sampled_from([S, T, S + T, 2 * S]), numbers)
        | st.builds(PythonMod, inner, numbers)
        | st.builds(lambda a, b: CeilToInt(IntTrueDiv(a, b)), st.sampled_from([S, T, S + T]), numbers)
    )


@settings(deadline=None, max_examples=150)
@given(
    st.recursive(st.sampled_from([S, T]) | numbers, _combined, max_leaves=4), st.integers(1, 512), st.integers(2, 16)
)
def test_any_expression_is_said_exactly_or_refused(expression: Any, seq: int, quarter: int) -> None:
    try:
        text = axis(expression)
    except ExportError:
        return
    value = int(sympy.sympify(expression).xreplace({S: sympy.Integer(seq), T: sympy.Integer(quarter)}))
    assert evaluate(text, {"seq": seq, "n": 4 * quarter}) == value


@pytest.mark.parametrize("expression", [Max(5, S), Min(S, 4 * T), 2**S, sympy.sqrt(S)])
def test_what_the_grammar_cannot_say(expression: Any) -> None:
    with pytest.raises(ExportError, match="which a contract cannot say"):
        axis(expression)


def test_the_refusal_names_the_dims() -> None:
    with pytest.raises(ExportError) as refused:
        axis(Max(5, S))
    assert refused.value.message == "output `y`: axis 0 is `Max(5, seq)`, which a contract cannot say"


def test_a_size_that_depends_on_values() -> None:
    with pytest.raises(ExportError, match="depends on the values of a tensor"):
        axis(sympy.Symbol("u0", integer=True) + S)


def test_a_text_that_says_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is evaluated and compared, so that a mistake in writing it is no wrong contract."""
    monkeypatch.setattr(expressions, "_text", lambda expression, symbols: ("seq", 2))
    assert axis(S) == "seq"
    with pytest.raises(ExportError, match="which a contract cannot say"):
        axis(S + FloorDiv(S, 512))  # equal to `seq` but for the largest size

"""The grammar of the options, and which axis of which input a dim is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mctl.bundle_format.errors import UsageError
from mctl.export.dims import DimSpec, InputSpec, bind, parse_dim, parse_input, parse_pad, parse_range

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
inputs = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
places = st.lists(st.tuples(inputs, st.integers(0, 15)), max_size=3, unique=True)


@given(names, st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 64), places)
def test_what_is_written_is_what_is_read(
    name: str, low: int, steps: int, multiple: int, bindings: list[tuple[str, int]]
) -> None:
    spec = DimSpec(name, low * multiple, (low + steps) * multiple, multiple, tuple(bindings))
    text = f"{spec.name}={spec.min}:{spec.max}:{spec.multiple}"
    if bindings:
        text += "@" + ",".join(f"{place}:{axis}" for place, axis in bindings)
    assert parse_dim(text) == spec


@given(st.text(alphabet="abz019=:@,._- []", max_size=20))
def test_any_text_is_a_dim_or_a_usage_error(text: str) -> None:
    try:
        spec = parse_dim(text)
    except UsageError as error:
        assert text in error.message
    else:
        assert spec.name.isidentifier() and 1 <= spec.min < spec.max
        assert spec.min % spec.multiple == 0 and spec.max % spec.multiple == 0


def test_the_forms_of_the_manual() -> None:
    assert parse_dim("batch=1:64") == DimSpec("batch", 1, 64)
    assert parse_dim("n=4:64:4") == DimSpec("n", 4, 64, 4)
    assert parse_dim("seq=1:512@ids:1,b.mask:1") == DimSpec("seq", 1, 512, 1, (("ids", 1), ("b.mask", 1)))
    assert parse_input("x=float32[batch, 128]") == InputSpec("x", "float32", ("batch", 128))
    assert parse_input("scale=float64[]") == InputSpec("scale", "float64", ())
    assert parse_range("ids=-1:30521") == ("ids", (-1, 30521))
    assert [parse_pad(f"x={value}")[1] for value in ("0", "-1.5", "1e-3")] == [0, -1.5, 0.001]
    assert [parse_pad(f"x={value}")[1] for value in ("true", "False")] == [1, 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("batch", "there is no `=`"),
        ("batch=", "no range"),
        ("batch=a:b", "no range"),
        ("batch=1:2:3:4", "no range"),
        ("batch=-1:4", "no range"),
        ("batch=1:\u0665", "no range"),
        ("2x=1:4", "`2x` is no identifier"),
        ("ba-tch=1:4", "no identifier"),
        ("bätch=1:4", "no identifier"),
        ("batch=0:4", "a size of 0"),
        ("batch=4:4", "a range of one value"),
        ("batch=4", "a range of one value"),
        ("batch=5:4", "the minimum 5 is larger than the maximum 4"),
        ("batch=1:9999999999999", "larger than 1099511627776"),
        ("n=4:64:0", "a multiple of 0"),
        ("n=2:64:4", "2 and 64 are not multiples of 4"),
        ("n=1:4@", "`` is no INPUT:AXIS"),
        ("n=1:4@x", "`x` is no INPUT:AXIS"),
        ("n=1:4@x:-1", "`x:-1` is no INPUT:AXIS"),
        ("n=1:4@x:0,x:0", "the same axis twice"),
    ],
)
def test_dims_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_dim(text)
    assert refused.value.message.startswith(f"`--dim {text}`: ") and why in refused.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "not of the form"),
        ("x=float32", "not of the form"),
        ("x=float32[1,2", "not of the form"),
        ("x=float99[1]", "there is no dtype `float99`"),
        ("x=complex64[1]", "there is no dtype `complex64`"),
        ("x=float32[0]", "the axis `0`"),
        ("x=float32[1,]", "the axis ``"),
        ("x=float32[-1]", "the axis `-1`"),
        ("x=float32[a b]", "the axis `a b`"),
    ],
)
def test_inputs_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_input(text)
    assert refused.value.message.startswith(f"`--input {text}`: ") and why in refused.value.message


@pytest.mark.parametrize("text", ["ids", "ids=", "ids=5", "ids=5:4", "ids=0.5:4", "=1:2"])
def test_ranges_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="INPUT=LOW:HIGH"):
        parse_range(text)


@pytest.mark.parametrize("text", ["x", "x=", "x=a", "x=nan", "x=inf", "=0", "x=1_000"])
def test_pads_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="INPUT=VALUE"):
        parse_pad(text)


SHAPES = {"ids": (2, 7), "mask": (2, 7), "scale": (), "table": (10, 4)}


def bound(*dims: str, supplied: tuple[str, ...] = ()) -> dict[str, tuple[int | str, ...]]:
    return bind([parse_dim(dim) for dim in dims], SHAPES, [parse_input(text) for text in supplied])


def test_a_dim_without_a_place_is_axis_0_of_every_input_but_scalars() -> None:
    assert bound("b=1:8") == {"ids": ("b", 7), "mask": ("b", 7), "scale": (), "table": ("b", 4)}


def test_a_dim_goes_where_it_is_put_and_the_other_takes_what_is_left() -> None:
    expected = {"ids": ("b", "s"), "mask": ("b", "s"), "scale": (), "table": ("n", 4)}
    assert bound("b=1:8", "s=1:8@ids:1,mask:1", "n=1:9@table:0") == expected


def test_an_input_option_places_dims_by_name() -> None:
    assert bound("b=1:8", "s=1:8@mask:1", supplied=("ids=int64[b,s]",)) == {
        "ids": ("b", "s"),
        "mask": ("b", "s"),
        "scale": (),
        "table": ("b", 4),
    }
    assert bound("b=1:8@mask:0", supplied=("ids=int64[b,7]",))["table"] == (10, 4)
    assert bound("b=1:8", supplied=("ids=int64[2,b]",))["mask"] == (2, 7)
    assert bound("b=1:8", supplied=("ids=int64[2,7]",))["ids"] == ("b", 7)


@pytest.mark.parametrize(
    ("dims", "why", "hint"),
    [
        (("b=1:8", "b=1:9@ids:0"), "`b` is declared twice", ""),
        (("b=1:8", "c=1:9"), "`b` and `c` are both axis 0", "--dim c=1:9@INPUT:AXIS"),
        (("b=1:8@x:0",), "there is no input `x`", "ids [2,7], mask [2,7], scale [], table [10,4]"),
        (("b=1:8@ids:2",), "input `ids` has no axis 2, it has 2", "ids [2,7]"),
        (("b=1:8@scale:0",), "no axis 0", "scale []"),
        (("b=1:8@ids:0", "c=1:8@ids:0"), "axis 0 of input `ids` is the dim `b` too", ""),
    ],
)
def test_places_that_are_refused(dims: tuple[str, ...], why: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        bound(*dims)
    assert why in refused.value.message and hint in (refused.value.hint or "")


def test_no_input_left_for_a_dim() -> None:
    with pytest.raises(UsageError, match="no input is left"):
        bind([parse_dim("a=1:8@x:0"), parse_dim("b=1:8")], {"x": (2,)})


@pytest.mark.parametrize(
    ("supplied", "why"),
    [
        (("ids=int64[b,s]",), "the dim `s` is not declared"),
        (("ids=int64[b,1]", "ids=int64[b,2]"), "`ids` is given twice"),
    ],
)
def test_input_options_that_do_not_fit_the_dims(supplied: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        bound("b=1:8", supplied=supplied)

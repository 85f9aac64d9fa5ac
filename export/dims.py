"""The grammar of `--dim`, `--input`, `--range` and `--pad`, and which axis of which input a dim is."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, get_args

from ..bundle_format.contract import DTYPES, MAX_DIM, Dim, Dtype, evaluate, names_in
from ..bundle_format.errors import ContractError, UsageError

Shape = tuple[int | str, ...]

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_INPUT = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_DIM_FORM = "--dim NAME=MIN:MAX[:MULTIPLE][@INPUT:AXIS,…]"
_INPUT_FORM = "--input NAME=DTYPE[SHAPE], as in `x=float32[batch,128]`"


class DimSpec(NamedTuple):
    """A dim as it was declared; `bindings` are (input, axis), empty where `@` was left out."""

    name: str
    min: int
    max: int
    multiple: int = 1
    bindings: tuple[tuple[str, int], ...] = ()

    @property
    def dim(self) -> Dim:
        return Dim(name=self.name, min=self.min, max=self.max, multiple=self.multiple)


class InputSpec(NamedTuple):
    """An example input that mctl makes. An axis is a size or the name of a dim."""

    name: str
    dtype: Dtype
    shape: Shape


def parse_dim(text: str) -> DimSpec:
    """`batch=1:64`, `n=4:64:4`, `seq=1:512@ids:1,mask:1`. UsageError says what is wrong with it."""
    head, at, places = text.partition("@")
    name, equals, sizes = head.partition("=")
    if not equals:
        _refuse("dim", text, "there is no `=`", _DIM_FORM)
    if not re.fullmatch(_NAME, name):
        _refuse("dim", text, f"`{name}` is no identifier", _DIM_FORM)
    numbers = sizes.split(":")
    if not all(re.fullmatch(r"\d{1,18}", number, re.ASCII) for number in numbers) or len(numbers) > 3:
        _refuse("dim", text, f"`{sizes}` is no range MIN:MAX or MIN:MAX:MULTIPLE", _DIM_FORM)
    low, *rest = map(int, numbers)
    high, multiple = (rest[0] if rest else low), (rest[1] if len(rest) > 1 else 1)
    if fault := _range_fault(low, high, multiple):
        _refuse("dim", text, *fault)
    bindings = tuple(_parse_place(text, place) for place in places.split(",")) if at else ()
    if len(set(bindings)) < len(bindings):
        _refuse("dim", text, "it names the same axis twice", _DIM_FORM)
    return DimSpec(name, low, high, multiple, bindings)


def _range_fault(low: int, high: int, multiple: int) -> tuple[str, str | None] | None:
    """What is wrong with a range, and the way out."""
    if low == 0:
        return "a size of 0 is not allowed", "start the range at 1 or more"
    if low > high:
        return f"the minimum {low} is larger than the maximum {high}", _DIM_FORM
    if low == high:
        return "it is a range of one value", "leave it out: what is not declared keeps the size of the example"
    if high > MAX_DIM:
        return f"the maximum is larger than {MAX_DIM}", None
    if multiple == 0:
        return "a multiple of 0 is not allowed", _DIM_FORM
    if low % multiple or high % multiple:
        return f"{low} and {high} are not multiples of {multiple}", "both ends have to be sizes that are allowed"
    return None


def _parse_place(text: str, place: str) -> tuple[str, int]:
    found = re.fullmatch(rf"({_INPUT}):(\d{{1,2}})", place, re.ASCII)
    if not found:
        _refuse("dim", text, f"`{place}` is no INPUT:AXIS", _DIM_FORM)
    return found[1], int(found[2])


def parse_input(text: str) -> InputSpec:
    """`x=float32[batch,128]`, `scale=float32[]`. UsageError says what is wrong with it."""
    found = re.fullmatch(rf"({_INPUT})=([^\[\]=]*)\[([^\[\]]*)\]", text, re.ASCII)
    if not found:
        _refuse("input", text, "it is not of the form NAME=DTYPE[SHAPE]", _INPUT_FORM)
    name, dtype, axes = found[1], found[2], [axis.strip() for axis in found[3].split(",")]
    if dtype not in get_args(Dtype):
        _refuse("input", text, f"there is no dtype `{dtype}`", f"one of {', '.join(DTYPES)}")
    return InputSpec(name, dtype, tuple(_parse_axis(text, axis) for axis in axes if axes != [""]))  # type: ignore[arg-type]


def _parse_axis(text: str, axis: str) -> int | str:
    if re.fullmatch(_NAME, axis, re.ASCII):
        return axis
    if not re.fullmatch(r"\d{1,13}", axis, re.ASCII) or not 1 <= int(axis) <= MAX_DIM:
        _refuse("input", text, f"the axis `{axis}` is neither a size of 1 or more nor the name of a dim", _INPUT_FORM)
    return int(axis)


ValueRange = tuple[int | str, int | str]


def parse_range(text: str) -> tuple[str, ValueRange]:
    """`ids=0:30521`, `edges=0:nodes-1`: an input and the smallest and largest value that it may hold."""
    hint = "as in `--range ids=0:30521`, or with dims `--range edges=0:nodes-1`"
    found = re.fullmatch(rf"({_INPUT})=([^:]+):([^:]+)", text, re.ASCII)
    if not found:
        _refuse("range", text, "it is not of the form INPUT=LOW:HIGH", hint)
    low, high = (_parse_bound(text, bound.strip(), hint) for bound in (found[2], found[3]))
    if isinstance(low, int) and isinstance(high, int) and low > high:
        _refuse("range", text, f"it is not of the form INPUT=LOW:HIGH: {low} is larger than {high}", hint)
    return found[1], (low, high)


def _parse_bound(text: str, bound: str, hint: str) -> int | str:
    if re.fullmatch(r"-?\d{1,19}", bound, re.ASCII):
        return int(bound)
    try:
        evaluate(bound, dict.fromkeys(names_in(bound), 1))
    except ContractError as error:
        _refuse("range", text, f"it is not of the form INPUT=LOW:HIGH: {error.message}", hint)
    if not names_in(bound):
        _refuse("range", text, f"`{bound}` is no integer and names no dim", hint)
    return bound


def parse_pad(text: str) -> tuple[str, int | float]:
    """`mask=0`, `valid=false`: an input and the value that fills it up to a bucket."""
    name, equals, value = text.partition("=")
    value = {"true": "1", "false": "0"}.get(value.lower(), value)  # of a bool
    number = re.fullmatch(r"-?\d{1,19}(\.\d*)?([eE][-+]?\d{1,3})?", value, re.ASCII)
    if not equals or not re.fullmatch(_INPUT, name, re.ASCII) or not number:
        _refuse("pad", text, "it is not of the form INPUT=VALUE", "as in `--pad ids=0`")
    return name, float(value) if number[1] or number[2] else int(value)


def _refuse(option: str, text: str, why: str, hint: str | None) -> NoReturn:
    raise UsageError(f"`--{option} {text}`: {why}", hint)


# --- which axis is which dim -------------------------------------------------------------------------------------


def bind(specs: Sequence[DimSpec], shapes: Mapping[str, Shape], supplied: Sequence[InputSpec] = ()) -> dict[str, Shape]:
    """Each input's shape with the names of dims in it.

    A dim without `@` is axis 0 of every input that is no scalar and that no `--input` describes with dims, except where
    another dim is placed, or where an `--input` has it on a later axis. UsageError for unknown inputs, axes and dims.
    """
    bound = {name: list(shape) for name, shape in shapes.items()}
    _check_names(specs, supplied)
    for described in supplied:
        bound[described.name] = list(described.shape)
    for spec in specs:
        for name, axis in spec.bindings:
            _check_place(spec, name, axis, shapes)
            if bound[name][axis] not in (spec.name, shapes[name][axis]):
                _refuse_two(spec.name, bound[name][axis], name, axis)
            bound[name][axis] = spec.name
    _bind_leading(specs, shapes, supplied, bound)
    return {name: tuple(shape) for name, shape in bound.items()}


def _bind_leading(
    specs: Sequence[DimSpec],
    shapes: Mapping[str, Shape],
    supplied: Sequence[InputSpec],
    bound: dict[str, list[int | str]],
) -> None:
    """The dim that no `@` places, nor an `--input` on a later axis, becomes axis 0 of every input that is free."""
    described_names = {name for name, _, shape in supplied if any(isinstance(axis, str) for axis in shape)}
    free = [name for name, shape in shapes.items() if shape and name not in described_names]
    open_names = [name for name in free if isinstance(bound[name][0], int)]
    placed = {axis for shape in bound.values() for axis in shape}
    unplaced = [spec for spec in specs if spec.name not in placed]
    if len(unplaced) > 1:
        first, second = unplaced[:2]
        hint = f"say which axis each one is: `--dim {second.name}={second.min}:{second.max}@INPUT:AXIS`"
        raise UsageError(f"the dims `{first.name}` and `{second.name}` are both axis 0 of every input", hint)
    if unplaced and not open_names:
        raise UsageError(f"no input is left that has the dim `{unplaced[0].name}` as axis 0", _listing(shapes))
    elsewhere = {axis for _, _, shape in supplied for axis in shape[1:]}
    leading = unplaced or [spec for spec in specs if not spec.bindings and spec.name not in elsewhere]
    for name in open_names if len(leading) == 1 else ():
        bound[name][0] = leading[0].name


def _check_names(specs: Sequence[DimSpec], supplied: Sequence[InputSpec]) -> None:
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the dim `{name}` is declared twice", "one `--dim` with several places: `@a:0,b:1`")
    inputs = [described.name for described in supplied]
    for described in supplied:
        if inputs.count(described.name) > 1:
            raise UsageError(f"the input `{described.name}` is given twice")
        for axis in described.shape:
            if isinstance(axis, str) and axis not in names:
                hint = f"add `--dim {axis}=MIN:MAX`, or write a size"
                raise UsageError(f"`--input {described.name}`: the dim `{axis}` is not declared", hint)


def _check_place(spec: DimSpec, name: str, axis: int, shapes: Mapping[str, Shape]) -> None:
    if name not in shapes:
        raise UsageError(f"`--dim {spec.name}`: there is no input `{name}`", _listing(shapes))
    if axis >= len(shapes[name]):
        rank = len(shapes[name])
        raise UsageError(f"`--dim {spec.name}`: input `{name}` has no axis {axis}, it has {rank}", _listing(shapes))


def _refuse_two(name: str, other: int | str, place: str, axis: int) -> NoReturn:
    what = f"fixed at {other} by `--input`" if isinstance(other, int) else f"the dim `{other}` too"
    raise UsageError(f"`--dim {name}`: axis {axis} of input `{place}` is {what}")


def _listing(shapes: Mapping[str, Shape]) -> str:
    inputs = ", ".join(f"{name} [{','.join(map(str, shape))}]" for name, shape in shapes.items())
    return f"the model's inputs are {inputs}"

"""The contract: what a model takes and gives, and the check that every runner makes before it calls the model.

The same rules and messages are implemented in runner/cpp/format/contract.cc; tests/vectors/contract/*.json runs both.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite, prod
from typing import Literal, NamedTuple

import msgspec

from .errors import ContractError

Dtype = Literal[
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
Scalar = None | bool | int | float | str

# Limits, mirrored in C++, where sizes are 64-bit and signed.
MAX_DIMS = 64
MAX_TENSORS = 4096  # inputs, outputs, constants or buffers
MAX_RANK = 16
MAX_DIM = 2**40  # the largest size of an axis
MAX_PAD = 2**53  # integers up to here are exact as float64
MAX_EXPRESSION = 256  # characters
MAX_EXPRESSION_DEPTH = 16  # parentheses and signs inside one another


class DtypeInfo(NamedTuple):
    oip: str  # Open Inference Protocol, section "Tensor Data Types"; BF16 is Triton's
    safetensors: str
    size: int  # bytes an element


DTYPES: dict[str, DtypeInfo] = {
    "bool": DtypeInfo("BOOL", "BOOL", 1),
    "uint8": DtypeInfo("UINT8", "U8", 1),
    "uint16": DtypeInfo("UINT16", "U16", 2),
    "uint32": DtypeInfo("UINT32", "U32", 4),
    "uint64": DtypeInfo("UINT64", "U64", 8),
    "int8": DtypeInfo("INT8", "I8", 1),
    "int16": DtypeInfo("INT16", "I16", 2),
    "int32": DtypeInfo("INT32", "I32", 4),
    "int64": DtypeInfo("INT64", "I64", 8),
    "float16": DtypeInfo("FP16", "F16", 2),
    "bfloat16": DtypeInfo("BF16", "BF16", 2),
    "float32": DtypeInfo("FP32", "F32", 4),
    "float64": DtypeInfo("FP64", "F64", 8),
}


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A value that reaches JSON: immutable, and no field is read that this version does not know."""


class Dim(Strict, frozen=True):
    """A named size: min..max, and a multiple of `multiple` (which divides min and max)."""

    name: str
    min: int
    max: int
    multiple: int = 1

    def allows(self, size: int) -> bool:
        return self.min <= size <= self.max and size % self.multiple == 0

    @property
    def allowed(self) -> str:
        steps = f" in steps of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.min}..{self.max}{steps}"


class Input(Strict, frozen=True):
    """A tensor argument. An axis is a fixed size or the name of a dim.

    `range`: smallest and largest value allowed, integer dtypes only. Either may be an expression over dims, as of an
    output's axis: an index of one of `nodes` things is in `(0, "nodes-1")`.
    """

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]
    range: tuple[int | str, int | str] | None = None
    pad: int | float | None = None  # the value that pads non-batch dims; None: they must not be padded


class Constant(Strict, frozen=True):
    """An argument that is no tensor, with the value that was compiled in."""

    name: str
    value: Scalar


class Output(Strict, frozen=True):
    """A tensor result. An axis is a fixed size or an expression over dims: integers, names, `+ - * //`, parentheses."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]


class State(Strict, frozen=True):
    """A buffer that the model changes when it runs."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]


class Contract(Strict, frozen=True):
    """What a model takes and gives. Inputs and outputs are in call order."""

    dims: tuple[Dim, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[Constant, ...] = ()
    state: tuple[State, ...] = ()
    batch_dim: str | None = None  # the dim that batching may grow: axis 0 of inputs and outputs that have it
    batch_note: str = ""  # why there is no batch_dim, for a person
    random: bool = False  # the model draws random numbers

    def dim(self, name: str) -> Dim:
        return next(d for d in self.dims if d.name == name)


class TensorInfo(NamedTuple):
    """What the check needs to know of a tensor; `low` and `high` are its extreme values where the input has a range."""

    dtype: str
    shape: tuple[int, ...]
    low: int | None = None
    high: int | None = None


def signature(tensor: Input | Output | State) -> str:
    """`float32[batch,128]`."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def check(
    contract: Contract,
    tensors: Mapping[str, TensorInfo],
    constants: Mapping[str, Scalar] | None = None,
    *,
    max_rows: int | None = None,
) -> dict[str, int]:
    """Bind the dims of `contract` to the sizes of named tensors; ContractError says what does not fit.

    `max_rows` replaces the batch dim's maximum, for a caller that splits large requests.
    """
    names = {i.name for i in contract.inputs}
    for name in tensors:
        if name not in names:
            raise ContractError(f"unknown input '{name}': the model takes {', '.join(i.name for i in contract.inputs)}")
    bound: dict[str, tuple[int, str, int]] = {}  # dim -> size, the input and axis that bound it
    for declared in contract.inputs:
        tensor = tensors.get(declared.name)
        if tensor is None:
            raise ContractError(f"missing input '{declared.name}': {signature(declared)}")
        _check_tensor(contract, declared, tensor, bound, max_rows)
        if not _is_over_dims(declared):
            _check_values(declared, tensor, {})
    dims = {name: size for name, (size, _, _) in bound.items()}
    for declared in contract.inputs:
        if _is_over_dims(declared):  # of inputs that come later, maybe
            _check_values(declared, tensors[declared.name], dims)
    for constant in contract.constants:
        if constants and constant.name in constants:
            given = constants[constant.name]
            if type(given) is not type(constant.value) or given != constant.value:
                was, now = _json(constant.value), _json(given)
                raise ContractError(f"constant '{constant.name}': is {now}, compiled in as {was}")
    for name in constants or ():
        if all(name != c.name for c in contract.constants):
            raise ContractError(f"unknown constant '{name}'")
    return dims


def _check_tensor(
    contract: Contract,
    declared: Input,
    tensor: TensorInfo,
    bound: dict[str, tuple[int, str, int]],
    max_rows: int | None,
) -> None:
    where = f"input '{declared.name}'"
    if tensor.dtype != declared.dtype:
        raise ContractError(f"{where}: dtype is {tensor.dtype}, allowed {declared.dtype}")
    if len(tensor.shape) != len(declared.shape):
        rank = len(declared.shape)
        raise ContractError(f"{where}: rank is {len(tensor.shape)}, allowed {rank} ({signature(declared)})")
    for axis, (size, wanted) in enumerate(zip(tensor.shape, declared.shape, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                raise ContractError(f"{where}: axis {axis} is {size}, allowed {wanted}")
            continue
        dim = contract.dim(wanted)
        if max_rows is not None and wanted == contract.batch_dim:
            dim = Dim(name=dim.name, min=dim.min, max=max_rows, multiple=dim.multiple)
        if not dim.allows(size):
            raise ContractError(f"{where}: axis {axis} is {size}, allowed {dim.allowed} ({wanted})")
        first = bound.setdefault(wanted, (size, declared.name, axis))
        if first[0] != size:
            raise ContractError(
                f"{where}: axis {axis} is {size}, but {wanted} is {first[0]} (input '{first[1]}', axis {first[2]})"
            )


def _is_over_dims(declared: Input) -> bool:
    return any(names_in(bound) for bound in declared.range or ())


def _check_values(declared: Input, tensor: TensorInfo, dims: Mapping[str, int]) -> None:
    limits = limits_of(declared, dims)
    if limits is None or tensor.low is None or tensor.high is None:
        return
    low, high = limits
    for value in (tensor.low, tensor.high):
        if not low <= value <= high:
            shown = "" if limits == declared.range else f" ({range_text(declared)})"
            raise ContractError(f"input '{declared.name}': value {value}, allowed {low}..{high}{shown}")


def _json(value: Scalar) -> str:
    return msgspec.json.encode(value).decode()


# --- expressions over dims ---------------------------------------------------------------------------------------


def evaluate(expression: int | str, dims: Mapping[str, int]) -> int:
    """The value of an axis for bound dims: `evaluate("2*seq+1", {"seq": 3}) == 7`.

    Grammar: sum = product (("+"|"-") product)*; product = factor (("*"|"//") factor)*;
    factor = integer | name | "-" factor | "(" sum ")", with spaces between tokens. `//` rounds down, as in Python.
    ContractError if it is malformed, divides by zero, or if any step leaves the signed 64-bit integers.
    """
    if isinstance(expression, int):
        return expression
    evaluator = _parsed(expression)
    try:
        return evaluator(dims)
    except ZeroDivisionError:
        raise ContractError(f"expression '{expression}' divides by zero") from None
    except OverflowError:
        raise ContractError(f"expression '{expression}' has more than 64 bits") from None


def names_in(expression: int | str) -> frozenset[str]:
    """The dims that an axis depends on."""
    return frozenset() if isinstance(expression, int) else frozenset(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", expression))


def shape_of(tensor: Input | Output, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or output for bound dims; ContractError if an axis has no size for them."""
    shape = tuple(evaluate(axis, dims) for axis in tensor.shape)
    for axis, size in enumerate(shape):
        if size < 0:
            raise ContractError(f"'{tensor.name}': axis {axis} is {size} ({tensor.shape[axis]})")
    return shape


def limits_of(declared: Input, dims: Mapping[str, int]) -> tuple[int, int] | None:
    """The smallest and largest value of an input at these sizes; None where any is allowed. ContractError."""
    return declared.range and (evaluate(declared.range[0], dims), evaluate(declared.range[1], dims))


def range_text(declared: Input) -> str:
    """`0..nodes-1`."""
    return "{}..{}".format(*declared.range or ("", ""))


def nbytes(tensor: Input | Output, dims: Mapping[str, int]) -> int:
    """Bytes of an input or output for bound dims."""
    return prod(shape_of(tensor, dims)) * DTYPES[tensor.dtype].size


_Evaluator = Callable[[Mapping[str, int]], int]


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Evaluator:
    return _Parser(text).parse()


class _Parser:
    """Recursive descent over the grammar of `evaluate`; builds closures, runs nothing."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_EXPRESSION:
            raise ContractError(f"expression of {len(text)} characters, allowed {MAX_EXPRESSION}")
        self.text = text
        self.tokens: list[str] = re.findall(r" *([0-9]{1,15}|[A-Za-z_][A-Za-z0-9_]*|//|[-+*()]|[^ ])", text)
        self.at = 0
        self.depth = 0

    def parse(self) -> _Evaluator:
        result = self.sum()
        if self.at != len(self.tokens):
            raise self.malformed()
        return result

    def malformed(self) -> ContractError:
        return ContractError(f"malformed expression '{self.text}'")

    def take(self, *wanted: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def sum(self) -> _Evaluator:
        left = self.product()
        while sign := self.take("+", "-"):
            left = _combine(sign, left, self.product())
        return left

    def product(self) -> _Evaluator:
        left = self.factor()
        while sign := self.take("*", "//"):
            left = _combine(sign, left, self.factor())
        return left

    def factor(self) -> _Evaluator:
        if opening := self.take("-", "("):
            return self.nested(opening)
        if self.at == len(self.tokens):
            raise self.malformed()
        token = self.tokens[self.at]
        self.at += 1
        if token[0] in "0123456789":
            number = int(token)
            return lambda dims: number
        if names_in(token):
            return lambda dims: dims[token]
        raise self.malformed()

    def nested(self, opening: str) -> _Evaluator:
        self.depth += 1
        if self.depth > MAX_EXPRESSION_DEPTH:
            raise self.malformed()
        inner = self.factor() if opening == "-" else self.sum()
        if opening == "(" and not self.take(")"):
            raise self.malformed()
        self.depth -= 1
        return inner if opening == "(" else lambda dims: _bounded(-inner(dims))


def _combine(sign: str, left: _Evaluator, right: _Evaluator) -> _Evaluator:
    if sign == "+":
        return lambda dims: _bounded(left(dims) + right(dims))
    if sign == "-":
        return lambda dims: _bounded(left(dims) - right(dims))
    if sign == "*":
        return lambda dims: _bounded(left(dims) * right(dims))
    return lambda dims: _bounded(left(dims) // right(dims))


def _bounded(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return value


# --- is the contract itself sound? -------------------------------------------------------------------------------

_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
_INTEGERS = {
    f"{sign}int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if sign == "" else (0, 2**bits - 1)
    for bits in (8, 16, 32, 64)
    for sign in ("", "u")
}  # dtype -> smallest and largest value


def validate(contract: Contract) -> None:
    """BundleError-worthy faults of a contract as a ContractError: names, ranges, undeclared dims, batching rules."""
    _check_names("dim", [d.name for d in contract.dims], MAX_DIMS)
    _check_names("input", [i.name for i in contract.inputs] + [c.name for c in contract.constants], MAX_TENSORS)
    _check_names("output", [o.name for o in contract.outputs], MAX_TENSORS)
    _check_names("state", [s.name for s in contract.state], MAX_TENSORS)
    if not contract.inputs or not contract.outputs:
        raise ContractError("a contract has at least one input and one output")
    for dim in contract.dims:
        _validate_dim(dim)
    dims = {d.name for d in contract.dims}
    for declared in contract.inputs:
        _validate_input(declared, dims)
        _validate_range(declared, contract.dims)
    for output in contract.outputs:
        _validate_shape(f"output '{output.name}'", output.shape, dims)
    for state in contract.state:
        _validate_shape(f"state '{state.name}'", state.shape, dims)
    for constant in contract.constants:
        _validate_constant(constant)
    unbound = dims - {axis for i in contract.inputs for axis in i.shape if isinstance(axis, str)}
    if unbound:
        raise ContractError(f"no input has the dim '{min(unbound)}'")
    if contract.batch_dim is not None and (fault := batch_fault(contract, contract.batch_dim)):
        raise ContractError(f"batch dim '{contract.batch_dim}': {fault}")


def _validate_dim(dim: Dim) -> None:
    if not _DIM_NAME.match(dim.name):
        raise ContractError(f"dim '{dim.name}' is no identifier")
    fits = 1 <= dim.min < dim.max <= MAX_DIM and dim.multiple >= 1
    if not fits or dim.min % dim.multiple or dim.max % dim.multiple:
        raise ContractError(f"dim '{dim.name}' has no sound range: {dim.allowed}")


def _validate_shape(where: str, shape: tuple[int | str, ...], dims: set[str]) -> None:
    if len(shape) > MAX_RANK:
        raise ContractError(f"{where} has {len(shape)} axes, allowed {MAX_RANK}")
    for axis in shape:
        if isinstance(axis, str):
            _parsed(axis)
        if names_in(axis) - dims:
            raise ContractError(f"{where}: '{axis}' names a dim that is not declared")
        if not names_in(axis) and not _is_size(axis):
            raise ContractError(f"{where} has an axis of {axis}, allowed 0..{MAX_DIM}")


def _is_size(axis: int | str) -> bool:
    """Whether an axis without dims is a size that is allowed."""
    try:
        return 0 <= evaluate(axis, {}) <= MAX_DIM
    except ContractError:
        return False


def _validate_input(declared: Input, dims: set[str]) -> None:
    where = f"input '{declared.name}'"
    for axis in declared.shape:
        if isinstance(axis, str) and axis not in dims:
            raise ContractError(f"{where} names the dim '{axis}', which is not declared")
    _validate_shape(where, declared.shape, dims)
    limits = _INTEGERS.get(declared.dtype)
    pad = declared.pad
    if pad is not None and limits is not None:
        if isinstance(pad, float) or not max(limits[0], -MAX_PAD) <= pad <= min(limits[1], MAX_PAD):
            raise ContractError(f"{where} has the pad value {pad}, which {declared.dtype} cannot hold")
    elif pad is not None and (not -1e308 <= pad <= 1e308 or (declared.dtype == "bool" and pad not in (0, 1))):
        raise ContractError(f"{where} has the pad value {pad}, which {declared.dtype} cannot hold")


def _validate_range(declared: Input, dims: tuple[Dim, ...]) -> None:
    """Of integers, within their dtype where it is fixed, and not empty where all dims are smallest or all largest."""
    if declared.range is None:
        return
    where = f"input '{declared.name}'"
    for bound in declared.range:
        if isinstance(bound, str):
            _parsed(bound)
            if names_in(bound) - {dim.name for dim in dims}:
                raise ContractError(f"{where}: '{bound}' names a dim that is not declared")
    limits = _INTEGERS.get(declared.dtype, (1, 0))  # no integers: none is in between
    least, most = max(limits[0], -(2**63)), min(limits[1], 2**63 - 1)
    fixed = [bound for bound in declared.range if not names_in(bound)]
    ends = [{dim.name: dim.min for dim in dims}, {dim.name: dim.max for dim in dims}]
    try:
        sound = all(least <= evaluate(bound, {}) <= most for bound in fixed) and least < most
        sound = sound and all(low <= high for low, high in (limits_of(declared, sizes) or (1, 0) for sizes in ends))
    except ContractError:
        sound = False
    if not sound:
        raise ContractError(f"{where} has no sound value range: {range_text(declared)}")


def _validate_constant(constant: Constant) -> None:
    value = constant.value
    if isinstance(value, float) and not isfinite(value):
        raise ContractError(f"constant '{constant.name}' is {value}, which JSON cannot hold")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ContractError(f"constant '{constant.name}' has more than 64 bits")


def batch_fault(contract: Contract, batch: str) -> str | None:
    """Why requests cannot be joined along the dim `batch` by looking at the shapes alone; None if they can be.

    Inputs that have the dim have it as axis 0 and nowhere else; every output has `batch` or `k*batch` as axis 0 and
    nowhere else, so that row i of the inputs owns rows k*i..k*(i+1) of the output. No input's values are bound by it.
    """
    if batch not in {d.name for d in contract.dims}:
        return "it is not declared"
    if contract.dim(batch).multiple != 1:
        return "it has a multiple"
    for declared in contract.inputs:
        if batch in declared.shape[1:]:
            return f"input '{declared.name}' has it on an axis other than 0"
        if any(batch in names_in(bound) for bound in declared.range or ()):
            return f"input '{declared.name}' has it in the range of its values"
    for output in contract.outputs:
        if not output.shape or rows_per_item(output, batch) is None:
            return f"output '{output.name}' does not have it as axis 0"
        if any(batch in names_in(axis) for axis in output.shape[1:]):
            return f"output '{output.name}' has it on an axis other than 0"
    return None


def rows_per_item(output: Output, batch: str) -> int | None:
    """k where axis 0 is `batch` (1), `k*batch` or `batch*k`; None for anything else."""
    if not output.shape:
        return None
    found = re.fullmatch(
        rf"(?:0*([1-9][0-9]{{0,8}})\*)?{batch}(?:\*0*([1-9][0-9]{{0,8}}))?", str(output.shape[0]).replace(" ", "")
    )
    return int(found[1] or 1) * int(found[2] or 1) if found else None


def _check_names(what: str, names: list[str], limit: int) -> None:
    if len(names) > limit:
        raise ContractError(f"a contract has {len(names)} of the kind '{what}', allowed {limit}")
    seen = set()
    for name in names:
        if not is_name(name):
            raise ContractError(f"{what} name '{name[:64]}' is not allowed: letters, digits, `_`, `.` and `-`")
        if name in seen:
            raise ContractError(f"{what} '{name}' is declared twice")
        seen.add(name)


def is_name(text: str) -> bool:
    """Whether inputs, outputs, models and versions may have this name: `[A-Za-z0-9_][A-Za-z0-9_.-]*`, at most 256."""
    return len(text) <= 256 and _NAME.match(text) is not None

"""The contract: what a model takes and gives, and the check that every runner makes before it calls the model.

The same rules and messages are implemented in runner/cpp/contract.cc; tests/vectors/contract/*.json runs both.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
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

MAX_DIM = (
    2**40
)  # the largest size an axis may declare: products of a few stay inside 64 bits by the checks in elements()
MAX_EXPRESSION = 256  # characters


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
    """A tensor argument. An axis is a fixed size or the name of a dim."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]
    range: tuple[int, int] | None = None  # smallest and largest value allowed, integer dtypes only
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


def signature(tensor: Input | Output) -> str:
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
    for constant in contract.constants:
        if constants and constant.name in constants:
            given = constants[constant.name]
            if type(given) is not type(constant.value) or given != constant.value:
                was, now = _json(constant.value), _json(given)
                raise ContractError(f"constant '{constant.name}': is {now}, compiled in as {was}")
    for name in constants or ():
        if all(name != c.name for c in contract.constants):
            raise ContractError(f"unknown constant '{name}'")
    return {name: size for name, (size, _, _) in bound.items()}


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
    if declared.range is not None and tensor.low is not None and tensor.high is not None:
        low, high = declared.range
        for value in (tensor.low, tensor.high):
            if not low <= value <= high:
                raise ContractError(f"{where}: value {value}, allowed {low}..{high}")


def _json(value: Scalar) -> str:
    return msgspec.json.encode(value).decode()


# --- expressions over dims ---------------------------------------------------------------------------------------


def evaluate(expression: int | str, dims: Mapping[str, int]) -> int:
    """The value of an axis for bound dims: `evaluate("2*seq+1", {"seq": 3}) == 7`. ContractError if it is malformed.

    Grammar: sum = product (("+"|"-") product)*; product = factor (("*"|"//") factor)*;
    factor = integer | name | "-" factor | "(" sum ")". `//` rounds down, as in Python.
    """
    return expression if isinstance(expression, int) else _parsed(expression)(dims)


def names_in(expression: int | str) -> frozenset[str]:
    """The dims that an axis depends on."""
    return frozenset() if isinstance(expression, int) else frozenset(re.findall(r"[A-Za-z_]\w*", expression))


def shape_of(tensor: Input | Output, dims: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or output for bound dims."""
    return tuple(evaluate(axis, dims) for axis in tensor.shape)


def nbytes(tensor: Input | Output, dims: Mapping[str, int]) -> int:
    """Bytes of an input or output for bound dims."""
    return prod(shape_of(tensor, dims)) * DTYPES[tensor.dtype].size


_Evaluator = Callable[[Mapping[str, int]], int]
_expressions: dict[str, _Evaluator] = {}


def _parsed(text: str) -> _Evaluator:
    found = _expressions.get(text)
    if found is None:
        found = _expressions[text] = _Parser(text).parse()
    return found


class _Parser:
    """Recursive descent over the grammar of `evaluate`; builds closures, runs nothing."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_EXPRESSION:
            raise ContractError(f"expression of {len(text)} characters, allowed {MAX_EXPRESSION}")
        self.text = text
        self.tokens: list[str] = re.findall(r"\s*(\d{1,15}|[A-Za-z_]\w*|//|[-+*()]|\S)", text)
        self.at = 0

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
        if self.take("-"):
            inner = self.factor()
            return lambda dims: -inner(dims)
        if self.take("("):
            result = self.sum()
            if not self.take(")"):
                raise self.malformed()
            return result
        if self.at == len(self.tokens):
            raise self.malformed()
        token = self.tokens[self.at]
        self.at += 1
        if token.isdecimal():
            number = int(token)
            return lambda dims: number
        if token.isidentifier() and token.isascii():
            return lambda dims: dims[token]
        raise self.malformed()


def _combine(sign: str, left: _Evaluator, right: _Evaluator) -> _Evaluator:
    if sign == "+":
        return lambda dims: left(dims) + right(dims)
    if sign == "-":
        return lambda dims: left(dims) - right(dims)
    if sign == "*":
        return lambda dims: left(dims) * right(dims)

    def divide(dims: Mapping[str, int]) -> int:
        divisor = right(dims)
        if divisor == 0:
            raise ContractError("expression divides by zero")
        return left(dims) // divisor

    return divide


# --- is the contract itself sound? -------------------------------------------------------------------------------

_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
_INTEGERS = {"uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}


def validate(contract: Contract) -> None:
    """BundleError-worthy faults of a contract as a ContractError: names, ranges, undeclared dims, batching rules."""
    _unique("dim", [d.name for d in contract.dims])
    _unique("input", [i.name for i in contract.inputs] + [c.name for c in contract.constants])
    _unique("output", [o.name for o in contract.outputs])
    if not contract.inputs or not contract.outputs:
        raise ContractError("a contract has at least one input and one output")
    for dim in contract.dims:
        if not _DIM_NAME.match(dim.name):
            raise ContractError(f"dim '{dim.name}' is no identifier")
        fits = 1 <= dim.min < dim.max <= MAX_DIM and dim.multiple >= 1
        if not fits or dim.min % dim.multiple or dim.max % dim.multiple:
            raise ContractError(f"dim '{dim.name}' has no sound range: {dim.allowed}")
    dims = {d.name for d in contract.dims}
    tensors: tuple[Input | Output, ...] = (*contract.inputs, *contract.outputs)
    for tensor in tensors:
        for axis in tensor.shape:
            if isinstance(axis, int) and not 0 <= axis <= MAX_DIM:
                raise ContractError(f"'{tensor.name}' has an axis of {axis}")
            if isinstance(tensor, Input) and isinstance(axis, str) and axis not in dims:
                raise ContractError(f"input '{tensor.name}' names dim '{axis}', which is not declared")
            if names_in(axis) - dims:
                raise ContractError(f"output '{tensor.name}': '{axis}' names a dim that is not declared")
            if isinstance(axis, str):
                _parsed(axis)
        if len(tensor.shape) > 16:
            raise ContractError(f"'{tensor.name}' has {len(tensor.shape)} axes, allowed 16")
    for declared in contract.inputs:
        if declared.range is not None and (declared.dtype not in _INTEGERS or declared.range[0] > declared.range[1]):
            raise ContractError(f"input '{declared.name}' has no sound value range")
    unbound = dims - {axis for i in contract.inputs for axis in i.shape if isinstance(axis, str)}
    if unbound:
        raise ContractError(f"no input has the dim '{min(unbound)}'")
    if contract.batch_dim is not None and (fault := batch_fault(contract, contract.batch_dim)):
        raise ContractError(f"batch dim '{contract.batch_dim}': {fault}")


def batch_fault(contract: Contract, batch: str) -> str | None:
    """Why requests cannot be joined along the dim `batch` by looking at the shapes alone; None if they can be.

    Inputs that have the dim have it as axis 0 and nowhere else; every output has `batch` or `k*batch` as axis 0 and
    nowhere else, so that row i of the inputs owns rows k*i..k*(i+1) of the output.
    """
    if batch not in {d.name for d in contract.dims}:
        return "it is not declared"
    if contract.dim(batch).multiple != 1:
        return "it has a multiple"
    for declared in contract.inputs:
        if batch in declared.shape[1:]:
            return f"input '{declared.name}' has it on an axis other than 0"
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
        rf"(?:([1-9]\d{{0,8}})\*)?{batch}(?:\*([1-9]\d{{0,8}}))?", str(output.shape[0]).replace(" ", "")
    )
    return int(found[1] or 1) * int(found[2] or 1) if found else None


def _unique(what: str, names: list[str]) -> None:
    for name in names:
        if len(name) > 256 or not _NAME.match(name):
            raise ContractError(f"{what} name '{name[:64]}' is not allowed: letters, digits, `_`, `.` and `-`")
        if names.count(name) > 1:
            raise ContractError(f"{what} '{name}' is declared twice")

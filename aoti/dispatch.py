"""Operators without a function of their own in torch's C interface are called by their names, by the variant itself.

The generated code calls torch's dispatcher through its C interface: `torch_call_dispatcher`. Arguments and results
travel as 64-bit values, made and read by torch/csrc/stable/stableivalue_conversions.h.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..bundle_format.errors import CompileError

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from .torch_private import Wrapper

_HEADER = "torch/csrc/stable/stableivalue_conversions.h"
_FROM, _TO = "torch::stable::detail::from", "torch::stable::detail::to"
_HANDLE = "AtenTensorHandle"
_OWN_HANDLE = """
// The dispatcher takes the handles that it is given: this makes one for it.
[[maybe_unused]] static AtenTensorHandle mctl_own_handle(AtenTensorHandle tensor) {
  AtenTensorHandle own = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &own));
  return own;
}
"""


def write_call(wrapper: "Wrapper", op: "OpOverload", arguments: Sequence[Any], names: Sequence[Any]) -> str:
    """Generates a call; returns the operator's name. `names`: the new variables for what comes back, as nested as that
    is; None: there is none. CompileError for what a variant cannot call.
    """
    from torch import ListType
    from torch._ops import OpOverload

    if not isinstance(op, OpOverload):
        raise CompileError(f"`{op}` works in a Python process only", "write that part of the model without it")
    wrapper.include(_HEADER, _OWN_HANDLE)
    schema = op._schema
    # inductor declares what an argument needs (a view, an array of sizes) here, and may use it again further down
    declared = [argument.real_type for argument in schema.arguments]
    values = [_value(wrapper, op, given, kind) for given, kind in zip(arguments, declared, strict=True)]
    results = list(_results(op, names))
    for name, _ in results:
        if name:
            wrapper.line(f"RAIIAtenTensorHandle {name};")
    wrapper.line("{")
    places = max(len(values), len(schema.returns))
    wrapper.line(f"std::array<StableIValue, {places}> values{{{', '.join(values)}}};")
    called = f"{json.dumps(schema.name)}, {json.dumps(schema.overload_name)}, values.data(), TORCH_ABI_VERSION"
    wrapper.line(f"AOTI_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher({called}));")
    for at, returned in enumerate(schema.returns):
        if isinstance(returned.real_type, ListType):
            wrapper.line(f"auto list_{at} = {_TO}<std::vector<{_HANDLE}>>(values[{at}]);")
    for name, handle in results:
        wrapper.line(f"{name + ' = ' if name else ''}RAIIAtenTensorHandle({handle});")
    wrapper.line("}")
    return str(op.name())


def _results(op: "OpOverload", names: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """For each tensor that comes back: the new variable for it ("": none, it is let go), and its handle."""
    from torch import ListType, OptionalType, TensorType

    returns = [returned.real_type for returned in op._schema.returns]
    if len(returns) == 1 and isinstance(returns[0], ListType):
        names = [names]
    for at, kind in enumerate(returns):
        name = names[at] if at < len(names) else None
        if isinstance(kind, TensorType):
            yield name or "", f"{_TO}<{_HANDLE}>(values[{at}])"
        elif isinstance(kind, OptionalType):
            yield name or "", f"{_TO}<std::optional<{_HANDLE}>>(values[{at}]).value_or(nullptr)"
        elif isinstance(kind, ListType):
            for place, each in enumerate(name or ()):
                yield each or "", f"list_{at}.at({place})"


def _value(wrapper: "Wrapper", op: "OpOverload", given: Any, kind: Any) -> str:
    """An expression for the 64 bits of one argument."""
    import torch

    if isinstance(kind, torch.OptionalType):
        inner = "std::nullopt"
        if given is not None:
            inner = f"std::optional<StableIValue>{{{_value(wrapper, op, given, kind.getElementType())}}}"
        return f"{_FROM}({inner})"
    if isinstance(kind, torch.ListType):
        items = ", ".join(_value(wrapper, op, each, kind.getElementType()) for each in given)
        return f"{_FROM}(std::vector<StableIValue>{{{items}}})"
    if isinstance(kind, torch.TensorType):
        return f"{_FROM}(mctl_own_handle({wrapper.tensor(given)}))"
    if isinstance(given, torch.device):
        device, index = wrapper.device(given)
        return f"(static_cast<StableIValue>({device}) << 32 | {index}u)"
    return f"{_FROM}({_plain(wrapper, op, given, kind)})"


def _plain(wrapper: "Wrapper", op: "OpOverload", given: Any, kind: Any) -> str:
    """An expression of the C++ type that the declared one stands for."""
    import torch

    if isinstance(given, (torch.dtype, torch.layout, torch.memory_format)):
        return wrapper.setting(given)
    if isinstance(given, str):
        return f"std::string({json.dumps(given)})"
    types = (
        ("bool", (torch.BoolType, torch.SymBoolType)),
        ("int64_t", (torch.IntType, torch.SymIntType)),
        ("double", (torch.FloatType,)),
    )
    for name, kinds in types:
        if isinstance(kind, kinds):
            return f"static_cast<{name}>({_number(wrapper, given)})"
    raise CompileError(
        f"`{op.name()}` takes a {kind}, which torch's C interface cannot hand over",
        "let it take a float, an int or a tensor, or write that part of the model with another operator",
    )


def _number(wrapper: "Wrapper", given: Any) -> str:
    if isinstance(given, float):
        if math.isfinite(given):
            return given.hex()
        limit = "quiet_NaN" if math.isnan(given) else "infinity"
        return f"{'-' if given < 0 else ''}std::numeric_limits<double>::{limit}()"
    return f"{int(given)}L" if isinstance(given, int) else wrapper.size(given)

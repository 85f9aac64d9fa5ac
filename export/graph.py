"""What the exported graph says of the model: training left on, random numbers, state, value ranges of embeddings."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ..bundle_format.errors import ExportError
from .failures import DENSE, WHOLE_NUMBERS
from .usercode import describe, quiet, user_line

_SAME_VALUES = {  # operators whose result holds nothing but values of their first argument
    "to", "_to_copy", "slice", "select", "view", "reshape", "expand", "clone", "contiguous", "unsqueeze", "squeeze",
    "flatten", "detach", "detach_", "alias", "transpose", "permute", "t", "narrow", "flip", "repeat", "unflatten",
    "lift_fresh_copy", "_unsafe_view", "expand_as", "view_as", "type_as", "split", "chunk", "unbind", "getitem",
}  # fmt: skip


def refuse_training(exported: ExportedProgram) -> None:
    """ExportError if dropout or batch norm still works as in training."""
    for node in _calls(exported):
        arguments = _arguments(node)
        name = _name(node)
        training = arguments.get("train", arguments.get("training", False)) is True
        if "norm" in name and training and arguments.get("running_mean") is not None:
            raise ExportError(f"batch norm is left in training: it would change its statistics{_at(node)}", _EVAL)
        share = arguments.get("p", arguments.get("dropout", 0.0)) if training else arguments.get("dropout_p", 0.0)
        if "norm" not in name and share:
            raise ExportError(f"dropout of {share} is left in training{_at(node)}", _EVAL)
        if name == "rrelu" and training:
            raise ExportError(f"a random leaky ReLU is left in training{_at(node)}", _EVAL)


_EVAL = "the model was put in eval mode: pass `training=self.training` to functions, and do not override `eval`"


def refuse_layouts(exported: ExportedProgram) -> None:
    """ExportError where the program makes a tensor that torch's compiler cannot: sparse or quantized."""
    for node in _calls(exported):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided:
            kind, hint = "sparse", DENSE
        elif _name(node).startswith("quantize_per"):
            kind, hint = "quantized", WHOLE_NUMBERS
        else:
            continue
        raise ExportError(f"the model makes a {kind} tensor, which torch's compiler does not take{_at(node)}", hint)


def random_line(exported: ExportedProgram) -> str | None:
    """`randn (model.py:12)` for the first operator that draws random numbers; None if there is none."""
    for node in _calls(exported):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        arguments = _arguments(node)
        draws = arguments.get("train", arguments.get("training", arguments.get("dropout_p", True)))
        if draws and not ("drop" in _name(node) and arguments.get("p") == 0):
            return f"`{_name(node)}`{_at(node)}"
    return None


def changed_names(exported: ExportedProgram) -> tuple[list[str], list[str]]:
    """Buffers (and parameters) that the model changes, and the program's inputs that it changes, by torch's names.

    ExportError where it changes a tensor that is neither.
    """
    if not any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in _calls(exported)):
        return [], []
    try:
        with quiet():
            signature = exported.run_decompositions({}).graph_signature
    except Exception as error:
        writers = (node for node in _calls(exported) if getattr(node.target, "_schema", None) and node.args)
        lines = [_at(node) for node in writers if node.target._schema.is_mutable and _is_constant(node.args[0])]
        if not lines:
            raise ExportError(f"torch cannot tell what the model changes: {describe(error)}") from error
        hint = "keep it in a buffer of the model: `self.register_buffer(…)`, changed in place"
        raise ExportError(f"the model changes a tensor that is no buffer{lines[0]}", hint) from error
    changed = {*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()}
    return sorted(changed), sorted(signature.user_inputs_to_mutate.values())


class Indexed(NamedTuple):
    """The sizes (ints or SymInts) that an index has to be below; `wraps`: from the end backwards it may be negative."""

    sizes: list[Any]
    wraps: bool


def index_sizes(exported: ExportedProgram) -> dict[str, Indexed]:
    """For each input (torch's name) that indexes something, as it comes or cast and cut: what it may hold.

    An embedding, `x[index]`, `gather`, `index_add` and the like. Where it indexes several things, all of them.
    """
    found: dict[str, Indexed] = {}
    for node in _calls(exported):
        for index, size, wraps in _indices(node):
            origin = _origin(index)
            if origin is not None and not _dtype(index).is_floating_point and _dtype(index) is not torch.bool:
                before = found.get(origin.name, Indexed([], True))
                found[origin.name] = Indexed([*before.sizes, size], before.wraps and wraps)
    users = {name for name in exported.graph_signature.user_inputs if isinstance(name, str)}
    return {name: indexed for name, indexed in found.items() if name in users}


_BY_AXIS = {
    "gather",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
    "scatter",
    "scatter_add",
    "scatter_reduce",
}


def _indices(node: Node) -> Iterator[tuple[Any, Any, bool]]:
    """Each index of an operator, the size that it has to be below, and whether negative ones count from the end."""
    name, arguments = _name(node).removesuffix("_"), _arguments(node)
    if name in ("embedding", "embedding_bag", "_embedding_bag"):
        if isinstance(node.args[0], Node):
            yield node.args[1], node.args[0].meta["val"].shape[0], False
    elif name in ("index", "index_put"):
        shape = node.args[0].meta["val"].shape
        for axis, index in enumerate(node.args[1]):
            if index is not None and all(_dtype(each) is not torch.bool for each in node.args[1] if each is not None):
                yield index, shape[axis], True
    elif name in _BY_AXIS and isinstance(arguments.get("dim"), int) and isinstance(arguments.get("index"), Node):
        shape = node.args[0].meta["val"].shape
        if shape:
            yield arguments["index"], shape[arguments["dim"]], False


def _dtype(value: Any) -> torch.dtype:
    return value.meta["val"].dtype


def result_values(exported: ExportedProgram) -> list[Any]:
    """The traced values of the user's outputs, in their order."""
    nodes = {node.name: node for node in exported.graph.nodes}
    return [nodes[name].meta["val"] for name in exported.graph_signature.user_outputs]


def input_values(exported: ExportedProgram) -> dict[str, Any]:
    """The traced values of the user's inputs, by torch's names, in their order."""
    nodes = {node.name: node for node in exported.graph.nodes}
    return {name: nodes[name].meta["val"] for name in exported.graph_signature.user_inputs}


def _calls(exported: ExportedProgram) -> Iterator[Node]:
    """Calls of operators, in the graph and in those inside it (branches, contexts)."""
    for module in exported.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _is_constant(value: Any) -> bool:
    """Whether it is a tensor that torch took for a constant, as it is no parameter, buffer or input."""
    origin = _origin(value)
    return origin is not None and origin.name.startswith(("c_", "lifted_tensor"))


def _origin(value: Any) -> Node | None:
    """The placeholder that the values come from unchanged."""
    while isinstance(value, Node) and value.op == "call_function" and _name(value) in _SAME_VALUES:
        value = value.args[0]
    return value if isinstance(value, Node) and value.op == "placeholder" else None


def _name(node: Node) -> str:
    """`embedding` of `aten.embedding.default`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _arguments(node: Node) -> Mapping[str, Any]:
    """Arguments by the names in the operator's schema, with their defaults."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def line_of(node: Node) -> str:
    """The user's line that a node comes from, "model.py:31"; empty where none is known."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return user_line((file, int(number)) for file, number in frames) or ""


def _at(node: Node) -> str:
    line = line_of(node)
    return f" ({line})" if line else ""

"""A program's linear layers, convolutions and attention as mctl's own operators, their weights packed once.

It is done on the graph that torch.export gives, before torch decomposes it: there a layer is still one node, and what
follows it (batch norm, a sum with a shortcut, an activation) is seen whole and becomes part of its kernel.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod, sqrt
from sys import maxsize
from typing import Any

import torch
from torch import Tensor, fx

from . import ops, packing
from .ops import Activation

aten = torch.ops.aten

_ACTIVATIONS: dict[Any, Callable[[fx.Node], Activation | None]] = {
    aten.relu.default: lambda node: Activation.RELU,
    aten.relu_.default: lambda node: Activation.RELU,
    aten.gelu.default: lambda node: {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(
        node.kwargs.get("approximate", "none")
    ),
    aten.silu.default: lambda node: Activation.SILU,
    aten.silu_.default: lambda node: Activation.SILU,
    aten.tanh.default: lambda node: Activation.TANH,
    aten.tanh_.default: lambda node: Activation.TANH,
    aten.sigmoid.default: lambda node: Activation.SIGMOID,
    aten.sigmoid_.default: lambda node: Activation.SIGMOID,
}
_WORTH_A_NOTE = 1 << 20  # bytes
_SUMS = (aten.add.Tensor, aten.add_.Tensor)
_VIEWS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default)  # of a constant weight


@dataclass(slots=True)
class _Layer:
    """A linear layer or convolution: the nodes that become one, in order, and what they compute."""

    nodes: list[fx.Node]
    residual: fx.Node | None = None
    activation: Activation = Activation.NONE

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    def next(self) -> fx.Node | None:
        """What alone looks at the result so far. The layer moves there: nothing may be changed in place on the way."""
        if len(self.last.users) != 1:
            return None
        user = next(iter(self.last.users))
        node = self.nodes[0].next
        while node is not user:
            if node not in self.nodes and _changes(node):
                return None
            node = node.next
        return user


def rewrite(
    module: fx.GraphModule,
    state: Collection[str],
    dtype: torch.dtype = torch.float32,
    note: Callable[[str], object] = lambda _: None,
) -> int:
    """Rewrites in place; returns how many layers were. `state`: buffers that the model changes, which stay as they are.

    Only what is float32 on the CPU and whose weights are constants: parameters and buffers, as `get_attr` nodes.
    `dtype`: that of the products of linear layers and convolutions, float32 or bfloat16. `note` gets what it costs.
    """
    rewriter = _Rewriter(module, set(state), dtype)
    for node in list(module.graph.nodes):
        if match := _MATCHES.get(node.target):
            rewriter.count += match(rewriter, node)
    module.graph.eliminate_dead_code()
    _drop_unused(module)
    module.recompile()
    rewriter.note_doubled(note)
    return rewriter.count


class _Rewriter:
    def __init__(self, module: fx.GraphModule, state: set[str], dtype: torch.dtype) -> None:
        self.module = module
        self.graph = module.graph
        self.dtype = dtype
        self.count = 0
        self._state = state
        self._packed: dict[Any, str] = {}
        self._sources: dict[str, str] = {}  # packed weights -> the attribute that they are made of
        self._variable = _depending_on_inputs(module.graph)

    def linear(self, node: fx.Node) -> bool:
        """aten.linear(x, weight, bias)."""
        x, weight, bias = _arguments(node, "input", "weight", "bias")
        return self._as_linear(node, x, weight, bias, transposed=False)

    def matmul(self, node: fx.Node) -> bool:
        """aten.matmul(x, weight) and aten.mm: the weight lies the other way round."""
        x, weight = node.args[:2]
        return self._as_linear(node, x, weight, None, transposed=True)

    def addmm(self, node: fx.Node) -> bool:
        """aten.addmm(bias, x, weight)."""
        bias, x, weight = node.args[:3]
        return not node.kwargs and self._as_linear(node, x, weight, bias, transposed=True)

    def conv1d(self, node: fx.Node) -> bool:
        return self._convolution(node, 1)

    def conv2d(self, node: fx.Node) -> bool:
        return self._convolution(node, 2)

    def conv_transpose1d(self, node: fx.Node) -> bool:
        return self._transposed(node, 1)

    def conv_transpose2d(self, node: fx.Node) -> bool:
        return self._transposed(node, 2)

    def attention(self, node: fx.Node) -> bool:
        """aten.scaled_dot_product_attention without dropout, of four axes."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        q, k, v, mask, dropout, causal, scale, grouped = _arguments(node, *names)
        if dropout or grouped or not all(_is_float(tensor, rank=4) for tensor in (q, k, v)):
            return False
        if mask is not None and _value(mask).dtype not in (torch.bool, torch.float32):
            return False
        if any(not _same_shape(_value(q).shape[:2], _value(other).shape[:2]) for other in (k, v)):
            return False  # heads or batches that are repeated
        if scale is None:
            size = _value(q).shape[3]
            if not isinstance(size, int):
                return False
            scale = 1 / sqrt(size)
        if mask is not None:
            mask = self._four_axes(node, mask)
        self._replace([node], ops.attention, (q, k, v, mask, float(scale), int(bool(causal))))
        return True

    # -------------------------------------------------------------------------------------------------------------

    def _as_linear(self, node: fx.Node, x: Any, weight: Any, bias: Any, *, transposed: bool) -> bool:
        values = self._constant(weight)
        if values is None or values.dim() != 2 or not self._fits(x, values) or _value(x).dim() < 1:
            return False
        n = values.shape[1] if transposed else values.shape[0]
        if bias is not None and (not _is_float(bias, rank=1) or not _same_shape(_value(bias).shape, (n,))):
            return False
        if n == 1:
            self._as_sum(node, x, weight, bias)
            return True
        layer = self._followed(node)
        packed = self._store(
            weight, transposed, lambda: packing.pack_linear(values.t() if transposed else values, self.dtype)
        )
        arguments = (x, packed, bias, layer.residual, n, int(layer.activation))
        self._replace(layer.nodes, ops.linear, arguments)
        return True

    def _as_sum(self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
        """A layer of one output, as a loop of torch's, with what follows: a panel would be nearly empty."""
        with self.graph.inserting_before(node):
            row = self._call(aten.reshape.default, weight, [-1])
            products = self._call(aten.mul.Tensor, x, row)
            made = self._call(aten.sum.dim_IntList, products, [-1], True)
            if bias is not None:
                made = self._call(aten.add.Tensor, made, bias)
        self._put([node], made)

    def _convolution(self, node: fx.Node, rank: int) -> bool:
        x, weight, bias, stride, padding, dilation, groups = _arguments(
            node, "input", "weight", "bias", "stride", "padding", "dilation", "groups"
        )
        values = self._constant(weight)
        if values is None or not self._fits(x, values) or not _is_float(x, rank=rank + 2):
            return False
        kernel = [1] * (2 - rank) + list(values.shape[2:])
        stride, dilation = _pair(stride, rank, 1), _pair(dilation, rank, 1)
        if isinstance(padding, str):
            both = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            if any(size % 2 for size in both):
                return False  # one more on one side
            padding = [size // 2 for size in both]
        else:
            padding = _pair(padding, rank, 0)
        layer = _Layer([node])
        scaled, shift, key = self._normed(layer, values, bias)
        if shift is None and bias is not None and not _is_float(bias, rank=1):
            return False
        layer = self._followed(node, layer)
        key = (groups, key)
        shaped, groups = packing.join_groups(scaled.reshape(*scaled.shape[:2], *kernel), groups)
        packed = self._store(weight, key, lambda: packing.pack_conv2d(shaped, groups, self.dtype))
        with self.graph.inserting_before(layer.last):
            offset = bias if shift is None else self._attribute(self._name_of(weight) + "_shift", shift)
            residual = layer.residual
            if rank == 1:
                x = self._call(aten.unsqueeze.default, x, 2)
                residual = residual and self._call(aten.unsqueeze.default, residual, 2)
        n = values.shape[0]
        arguments = (
            x,
            packed,
            offset,
            residual,
            n,
            kernel,
            stride,
            padding,
            dilation,
            groups,
            int(layer.activation),
        )
        self._replace(layer.nodes, ops.conv2d, arguments, squeeze=rank == 1)
        return True

    def _transposed(self, node: fx.Node, rank: int) -> bool:
        """A transposed convolution: one that makes stride x stride pixels of each, and a copy that orders them."""
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        x, weight, bias, stride, padding, extra, groups, dilation = _arguments(node, *names)
        values, given = self._constant(weight), None if bias is None else self._constant(bias)
        if values is None or not self._fits(x, values) or not _is_float(x, rank=rank + 2):
            return False
        kernel = [1] * (2 - rank) + list(values.shape[2:])
        strides, padding, extra = _pair(stride, rank, 1), _pair(padding, rank, 0), _pair(extra, rank, 0)
        sizes = [1] * (2 - rank) + list(_value(x).shape[2:])
        # the stride of one pixel means nothing: it makes all at once
        sh, sw = (max(k, s) if str(n) == "1" else s for n, k, s in zip(sizes, kernel, strides, strict=True))
        phases = packing.as_phases(values.reshape(*values.shape[:2], *kernel), (sh, sw), groups)
        taps = list(phases.shape[3:])
        around = [t - 1 - p // s for t, p, s in zip(taps, padding, (sh, sw), strict=True)]
        starts = [p % s for p, s in zip(padding, (sh, sw), strict=True)]
        left = [
            s * (t - p // s) + p - k - e for s, t, p, k, e in zip((sh, sw), taps, padding, kernel, extra, strict=True)
        ]  # pixels at the end
        if min(*around, *left) < 0 or _pair(dilation, rank, 1) != [1, 1] or (bias is not None and given is None):
            return False
        layer = _Layer([node])
        scaled, shift, key = self._normed(layer, phases, bias)
        n = scaled.shape[0]
        key = ("transposed", sh, sw, groups, key)
        shaped, groups = packing.join_groups(scaled.flatten(0, 1), groups)
        packed = self._store(weight, key, lambda: packing.pack_conv2d(shaped, groups, self.dtype))
        shift = given if shift is None else shift
        with self.graph.inserting_before(layer.last):
            offset = None
            if shift is not None:
                offset = self._attribute(self._name_of(weight) + "_shift", shift.repeat_interleave(sh * sw))
            made = self._call(aten.unsqueeze.default, x, 2) if rank == 1 else x
            numbers = (n * sh * sw, taps, [1, 1], around, [1, 1], groups, int(Activation.NONE))
            made = self._call(ops.conv2d, made, packed, offset, None, *numbers)
            made = self._call(aten.unflatten.int, made, 1, [n, sh, sw])
            made = self._call(aten.permute.default, made, [0, 1, 4, 2, 5, 3])
            for axis, start, cut in zip((2, 3), starts, left, strict=True):
                made = self._call(aten.flatten.using_ints, made, axis, axis + 1)
                if start or cut:
                    made = self._call(aten.slice.Tensor, made, axis, start, -cut if cut else maxsize)
            if rank == 1:
                made = self._call(aten.squeeze.dim, made, 2)
            made = self._call(aten.contiguous.default, made)  # what follows may be a view of that
        self._put(layer.nodes, made)
        return True

    def _call(self, op: Any, *arguments: Any) -> fx.Node:
        return self.graph.call_function(op, arguments)

    def _normed(self, layer: _Layer, weight: Tensor, bias: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Weights and bias with the batch norm that follows, if its numbers are constants; and what names them."""
        norm = layer.next()
        if norm is None or norm.target is not aten.batch_norm.default:
            return weight, None, None
        _, scale, shift, mean, variance, training, _, epsilon, *_ = norm.args
        constants = [None if c is None else self._constant(c) for c in (scale, shift, mean, variance, bias)]
        given = [c is not None for c in (scale, shift, mean, variance, bias)]
        known = [c is not None for c in constants]
        if training or given != known or mean is None or variance is None:
            return weight, None, None
        gamma, beta, center, spread, offset = (None if c is None else c.double() for c in constants)
        factor = (spread + epsilon).rsqrt() * (1 if gamma is None else gamma)
        assert center is not None and spread is not None
        start = (0 if offset is None else offset) - center
        folded = start * factor + (0 if beta is None else beta)
        layer.nodes.append(norm)
        by_output = factor.reshape(-1, *[1] * (weight.dim() - 1))
        return (weight.double() * by_output).float(), folded.float(), norm.name

    def _followed(self, node: fx.Node, layer: _Layer | None = None) -> _Layer:
        """The layer with what follows it, as long as nothing else looks at what is between."""
        layer = layer or _Layer([node])
        while (user := layer.next()) is not None:
            if user.target is aten.dropout.default and not user.args[2]:
                layer.nodes.append(user)
            elif (act := _ACTIVATIONS.get(user.target)) and (activation := act(user)) is not None:
                layer.nodes.append(user)
                layer.activation = activation
                return layer
            elif layer.residual is None and (other := self._addend(user, layer.last)) is not None:
                layer.nodes.append(user)
                layer.residual = other
            else:
                return layer
        return layer

    def _addend(self, node: fx.Node, mine: fx.Node) -> fx.Node | None:
        """The other side of a sum of two tensors of one shape."""
        if node.target not in _SUMS or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            return None
        left, right = node.args
        other = right if left is mine else left
        if other is mine or not isinstance(other, fx.Node) or (node.target is aten.add_.Tensor and left is not mine):
            return None
        if not _is_float(other) or not _same_shape(_value(other).shape, _value(mine).shape):
            return None
        return other if other in self._variable else None

    def _four_axes(self, node: fx.Node, mask: fx.Node) -> fx.Node:
        with self.graph.inserting_before(node):
            for _ in range(4 - _value(mask).dim()):
                mask = self._call(aten.unsqueeze.default, mask, 0)
        return mask

    def _fits(self, x: Any, weight: Tensor) -> bool:
        dense = weight.dtype == torch.float32 and prod(weight.shape) > 0
        return dense and x in self._variable and _is_float(x)

    def _constant(self, node: Any) -> Tensor | None:
        """The tensor behind `node`, if no input and no state is: a parameter, or one turned round."""
        if not isinstance(node, fx.Node):
            return None
        if node.op == "get_attr":
            found = _attribute_of(self.module, str(node.target))
            sound = isinstance(found, Tensor) and str(node.target) not in self._state
            return found.detach() if sound else None
        if node.target in _VIEWS:
            inner = self._constant(node.args[0])
            return None if inner is None else node.target(inner, *node.args[1:])
        return None

    def note_doubled(self, note: Callable[[str], object]) -> None:
        """Of weights that something else of the model looks at too: an embedding that is also the last layer."""
        left = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for packed, name in self._sources.items():
            size = _attribute_of(self.module, packed).nbytes if packed in left else 0
            if name in left and size >= _WORTH_A_NOTE:
                note(
                    f"`{name}` is stored twice, for {size / 1e6:.1f} MB more: packed for mctl's kernels, and as the "
                    "rest of the model uses it; `--kernels torch` stores it once"
                )

    def _store(self, weight: fx.Node, key: Any, pack: Callable[[], Tensor]) -> fx.Node:
        """Packed weights as a buffer of the module; layers that share weights share it."""
        known = (weight, key)
        if known not in self._packed:
            self._packed[known] = self._add_buffer(self._name_of(weight) + "_packed", pack())
            self._sources[self._packed[known]] = _root(weight)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            return self._get(self._packed[known])

    def _attribute(self, name: str, value: Tensor) -> fx.Node:
        return self._get(self._add_buffer(name, value))

    def _get(self, name: str) -> fx.Node:
        node = self.graph.get_attr(name)
        node.meta["val"] = None
        return node

    def _add_buffer(self, name: str, value: Tensor) -> str:
        unique, number = name, 1
        while hasattr(self.module, unique):
            number += 1
            unique = f"{name}_{number}"
        self.module.register_buffer(unique, value)
        return unique

    def _name_of(self, weight: fx.Node) -> str:
        return _root(weight).replace(".", "_")

    def _replace(self, nodes: list[fx.Node], op: Any, arguments: tuple[Any, ...], *, squeeze: bool = False) -> None:
        last = nodes[-1]
        with self.graph.inserting_before(last):
            made = self.graph.call_function(op, arguments)
            if squeeze:
                made = self._call(aten.squeeze.dim, made, 2)
        self._put(nodes, made)

    def _put(self, nodes: list[fx.Node], made: fx.Node) -> None:
        """In the place of these."""
        last = nodes[-1]
        made.meta = {key: value for key, value in last.meta.items() if key in ("val", "nn_module_stack", "stack_trace")}
        last.replace_all_uses_with(made)
        for node in reversed(nodes):  # some of them change their input: they would not be seen as dead
            self.graph.erase_node(node)
        self._variable.add(made)


_MATCHES: dict[Any, Callable[[_Rewriter, fx.Node], bool]] = {
    aten.linear.default: _Rewriter.linear,
    aten.matmul.default: _Rewriter.matmul,
    aten.mm.default: _Rewriter.matmul,
    aten.addmm.default: _Rewriter.addmm,
    aten.conv1d.default: _Rewriter.conv1d,
    aten.conv2d.default: _Rewriter.conv2d,
    aten.conv1d.padding: _Rewriter.conv1d,
    aten.conv2d.padding: _Rewriter.conv2d,
    aten.conv_transpose1d.default: _Rewriter.conv_transpose1d,
    aten.conv_transpose2d.input: _Rewriter.conv_transpose2d,
    aten.scaled_dot_product_attention.default: _Rewriter.attention,
}


def _root(weight: fx.Node) -> str:
    """The attribute that a constant is, or is a view of."""
    while weight.op != "get_attr":
        weight = weight.args[0]
    return str(weight.target)


def _depending_on_inputs(graph: fx.Graph) -> set[fx.Node]:
    """What torch cannot compute while it compiles."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    schema = node.target._schema
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return [given.get(name, defaults[name]) for name in names]


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _is_float(node: Any, rank: int | None = None) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.device.type != "cpu":
        return False
    return rank is None or value.dim() == rank


def _same_shape(one: Any, other: Any) -> bool:
    """Equal as expressions: comparing symbols themselves would settle them."""
    return [str(size) for size in one] == [str(size) for size in other]


def _changes(node: fx.Node) -> bool:
    """Whether it writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _pair(size: Any, rank: int, lone: int) -> list[int]:
    """Sizes of two axes: torch gives one number for both, or one for each of `rank` axes."""
    sizes = [size] if isinstance(size, int) else list(size)
    if len(sizes) == 1:
        sizes *= rank
    return [lone] * (2 - rank) + sizes


def _attribute_of(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _drop_unused(module: fx.GraphModule) -> None:
    """Weights that only their packed copies stand for now."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in [*module.named_parameters(), *module.named_buffers()] if name not in used]:
        path, _, last = name.rpartition(".")
        delattr(module.get_submodule(path), last)

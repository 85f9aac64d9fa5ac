"""Causal language models of several kinds as one function: tokens at positions in, logits of some of them out."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..bundle_format.errors import ExportError
from ..export.usercode import current_place
from .attention import Call, attend

SDPA = "use `scaled_dot_product_attention(q, k, v, is_causal=True)`, or write `forward(tokens, positions, attend)`"


class Model(Protocol):
    """A model for generation."""

    @property
    def module(self) -> nn.Module: ...

    def step(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits [rows, vocabulary] with the attention of `attending`; tokens, positions and rows have one axis."""

    def whole(self, tokens: Tensor, module: nn.Module | None = None) -> Tensor:
        """Logits [tokens, vocabulary] of one sequence, as the model itself computes them; `module`: a copy of it."""

    def check_layers(self, count: int) -> None:
        """ExportError if so many calls of attention are not all of it."""


def adapted(module: nn.Module) -> Model:
    """The model for its kind. ExportError where it is of none."""
    if hasattr(module, "set_attn_implementation"):
        return HuggingFace(module)
    parameters = inspect.signature(module.forward).parameters
    return Explicit(module) if "attend" in parameters else Plain(module)


# --- transformers ------------------------------------------------------------------------------------------------

_NAME = "mctl"  # of the attention that is registered


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A `PreTrainedModel`, whose attention is a function by name."""

    module: Any

    def __post_init__(self) -> None:
        if getattr(self.module.config, "is_encoder_decoder", False):
            raise ExportError(
                f"`{type(self.module).__name__}` is an encoder with a decoder", "only decoders can be exported so far"
            )
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(_NAME, _hugging_face_attention)
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)

    def step(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        with self._ours():
            return self._call(self.module, tokens, positions, rows)

    def whole(self, tokens: Tensor, module: nn.Module | None = None) -> Tensor:
        return self._call(module or self.module, tokens, torch.arange(len(tokens)), torch.arange(len(tokens)))

    def check_layers(self, count: int) -> None:
        config = self.module.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", count)
        if count != layers:
            raise ExportError(
                f"`{type(self.module).__name__}` has {layers} layers and called transformers' attention {count} times",
                "only models whose every layer is attention by `AttentionInterface` can be exported so far",
            )

    @staticmethod
    def _call(module: Any, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        made = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        logits: Tensor = made.logits[0]
        return logits

    @contextmanager
    def _ours(self) -> Iterator[None]:
        config = self.module.config
        before = config._attn_implementation
        self.module.set_attn_implementation(_NAME)
        try:
            yield
        finally:
            self.module.set_attn_implementation(before)


def _hugging_face_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: [1, heads, tokens, size] in, [1, tokens, heads, size] out."""
    if mask is not None:
        raise ExportError("the model makes an attention mask of its own, which would be lost")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    call = Call(
        q,
        k,
        v,
        scale=options.get("scaling"),
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
    )
    return attend(call)[None], None


# --- modules of torch alone --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explicit:
    """A module that leaves its attention to its caller: `forward(tokens, positions, attend)` gives logits."""

    module: nn.Module

    def step(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = self.module(tokens, positions, _attend_flat)
        return logits[rows]

    def whole(self, tokens: Tensor, module: nn.Module | None = None) -> Tensor:
        logits: Tensor = (module or self.module)(tokens, torch.arange(len(tokens)), _attend_densely)
        return logits

    def check_layers(self, count: int) -> None:
        if not count:
            raise ExportError("the model never calls `attend`", "call it once a layer: `attend(q, k, v)`")


def _attend_flat(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [tokens, heads, size], k and v [tokens, heads of keys, size]; gives [tokens, heads, size of v]."""
    return attend(Call(q, k, v, scale, window, softcap, sinks))


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    from .attention import dense

    return dense(Call(q, k, v, **options))


@dataclass(frozen=True, slots=True)
class Plain:
    """A module that was written for whole sequences: token ids [1, tokens] in, logits [1, tokens, vocabulary] out.

    While a step runs, the functions by which it looks at its sequence are replaced: causal attention, and the numbers
    of its positions.
    """

    module: nn.Module
    _seen: dict[str, str] = field(default_factory=dict)  # what is not replaced -> its line

    def step(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        owned = [value for module in self.module.modules() for value in vars(module).values()]
        constants = {id(value) for value in [*self.module.parameters(), *self.module.buffers(), *owned]}
        mode = _Sequence(tokens.shape[0], positions, rows, constants, self._seen)
        with mode:
            logits = _logits_of(self.module(tokens[None]))
        return logits if mode.cut else logits[rows]

    def whole(self, tokens: Tensor, module: nn.Module | None = None) -> Tensor:
        last = torch.arange(len(tokens))
        mode = _Sequence(len(tokens), None, last, set(), {})
        with mode:
            return _logits_of((module or self.module)(tokens[None]))

    def check_layers(self, count: int) -> None:
        if not count:
            line = next(iter(self._seen.values()), "")
            where = f": its own softmax is at {line}" if line else ""
            raise ExportError(f"the model never calls `scaled_dot_product_attention`{where}", SDPA)


def _logits_of(made: Any) -> Tensor:
    """The logits [tokens, vocabulary] in what a module returns: they are it, its first, or its attribute `logits`."""
    made = getattr(made, "logits", made)
    made = made[0] if isinstance(made, (tuple, list)) and made else made
    made = made.get("logits") if isinstance(made, dict) else made
    if not isinstance(made, Tensor) or made.dim() not in (2, 3) or (made.shape[0] != 1 and made.dim() == 3):
        shape = f" of shape {list(made.shape)}" if isinstance(made, Tensor) else ""
        raise ExportError(
            f"for ids [1, tokens] the model returns {type(made).__name__}{shape}",
            "return logits [1, tokens, vocabulary]",
        )
    return made[0] if made.dim() == 3 else made


class _Sequence(TorchFunctionMode):  # type: ignore[misc]
    """Runs a module over tokens that are not a whole sequence. Without `positions` it only keeps all rows of logits."""

    def __init__(
        self, length: Any, positions: Tensor | None, rows: Tensor, constants: set[int], seen: dict[str, str]
    ) -> None:
        super().__init__()
        self.length, self.positions, self.rows = length, positions, rows
        self.constants, self.seen = constants, seen
        self.cut = False  # the model took the last token itself: these are the wanted rows

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.__getitem__:
            return self._item(*args)
        if self.positions is not None:
            if function is F.scaled_dot_product_attention:
                return self._attention(current_place().line or "", *args, **kwargs)
            if function is torch.arange and self._counts(args, kwargs):
                return self.positions.to(kwargs.get("dtype") or self.positions.dtype)
            if function in (F.softmax, torch.softmax, Tensor.softmax) and "softmax" not in self.seen:
                self.seen["softmax"] = current_place().line or ""
        return function(*args, **kwargs)

    def _is_length(self, size: Any) -> bool:
        if isinstance(size, torch.SymInt) and isinstance(self.length, torch.SymInt):
            return bool(size.node.expr == self.length.node.expr)
        plain = isinstance(size, int) and isinstance(self.length, int) and not isinstance(size, bool)
        return plain and size == self.length

    def _counts(self, args: Any, kwargs: Any) -> bool:
        """Whether these arguments of `arange` count the tokens: `arange(T)`, `arange(0, T)`."""
        given = [*args, *(kwargs[name] for name in ("start", "end") if name in kwargs)]
        return bool(given) and len(given) <= 2 and self._is_length(given[-1]) and given[:-1] in ([], [0])

    def _item(self, tensor: Tensor, index: Any) -> Tensor:
        axes = index if isinstance(index, tuple) else (index,)
        if any(isinstance(axis, Tensor) or axis is None or axis is Ellipsis for axis in axes):
            return tensor[index]
        if self.positions is not None and id(tensor) in self.constants:
            for axis, part in enumerate(axes):  # a table of the positions: its first rows
                if (
                    isinstance(part, slice)
                    and part.start in (None, 0)
                    and part.step is None
                    and self._is_length(part.stop)
                ):
                    rest = tuple(slice(None) if at == axis else each for at, each in enumerate(axes))
                    return tensor.index_select(axis, self.positions)[rest]
        if self._is_last_token(tensor, axes):
            self.cut = True
            return tensor.index_select(1, self.rows)
        return tensor[index]

    def _is_last_token(self, tensor: Tensor, axes: tuple[Any, ...]) -> bool:
        """`x[:, [-1], :]`, `x[:, -1:]`, `x[:, -1]`, of [1, tokens, size]."""
        if tensor.dim() != 3 or len(axes) < 2 or axes[0] != slice(None) or axes[2:] not in ((), (slice(None),)):
            return False
        return axes[1] in ([-1], slice(-1, None), -1) and self._is_length(tensor.shape[1])

    def _attention(
        self,
        line: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or not is_causal:
            what = "is given a mask" if attn_mask is not None else "is not causal"
            raise ExportError(f"`scaled_dot_product_attention` {what} ({line})", SDPA)
        if query.dim() != 4 or query.shape[0] != 1:
            shape = [str(size) for size in query.shape]
            raise ExportError(f"`scaled_dot_product_attention` gets queries [{', '.join(shape)}] ({line})", SDPA)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        made = attend(Call(q, k, v, scale))
        return made.transpose(0, 1)[None]

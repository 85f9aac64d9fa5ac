"""AOTI's C interface by its names: which imports of compiled code are operators, and which only handle tensors."""

from collections.abc import Iterable, Sequence

# Operators that torch 2.13 still exports by their old names: torch/csrc/inductor/aoti_torch/c/shim{,_deprecated}.h.
_OLD = frozenset(
    f"aoti_torch_{name}"
    for name in (
        "_fft_c2c",
        "_mm_plus_mm_out",
        "_scaled_mm",
        "_scaled_mm_v2",
        "addmm_out",
        "bmm_out",
        "convolution",
        "index_put_out",
        "mm_out",
        "nonzero",
        "repeat_interleave_Tensor",
        "scatter_out",
        "scatter_reduce_out",
        "view_as_real",
        "view_dtype",
        "_embedding_bag",
    )
)
_OPERATORS = ("aoti_torch_cpu_", "aoti_torch_aten_")


def operator(symbol: str) -> str | None:
    """The operator that an import calls: "convolution" for `aoti_torch_cpu_convolution`, "median.dim" for
    `aten::median.dim`, which is called by its name; None if it calls none.
    """
    if is_name(symbol):
        return symbol.removeprefix("aten::")
    if symbol in _OLD:
        return symbol.removeprefix("aoti_torch_")
    prefix = next((prefix for prefix in _OPERATORS if symbol.startswith(prefix)), None)
    return symbol.removeprefix(prefix) if prefix else None


def is_name(symbol: str) -> bool:
    """Whether an import is no symbol but the name of an operator, which torch's dispatcher finds."""
    return "::" in symbol


def operators(symbols: Iterable[str]) -> tuple[str, ...]:
    """Those that the imports call, sorted."""
    return tuple(sorted({name for symbol in symbols if (name := operator(symbol))}))


def with_callers(operator: str, modules: Sequence[str]) -> str:
    """In a user's terms, with the modules that it comes from: "`convolution` (features.0, features.3)"."""
    where = f" ({', '.join(modules[:4])}{', …' if len(modules) > 4 else ''})" if modules else ""
    return f"`{operator}`{where}"

"""The settings of torch's compiler: what mctl needs, and what `--inductor KEY=VALUE` adds."""

import difflib
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin

from ..bundle_format.errors import UsageError
from . import torch_private

# Without these there would be no bundle.
_NEEDED: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",  # gives them back in memory; nothing is pickled
    "aot_inductor.link_libtorch": False,
    "aot_inductor.output_path": "",
    "cpp_wrapper": True,
}
_DEFAULTS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # otherwise the thread count of this process is compiled in
    # torch probes the CPU by loading a small library that links to libtorch; with link_libtorch off the probe always
    # fails, and the code would not be vectorised
    "cpp.vec_isa_ok": True,
    "aot_inductor.precompile_headers": False,  # building.py does, and keeps them
    "aot_inductor.enable_line_tables": False,
    # otherwise a hash of, among others, this machine's paths, which the library then holds
    "aot_inductor.model_name_for_generated_files": "model",
    "compile_threads": 1,  # no pool of worker processes: there is one C++ file
}
# A buffer with one element that the model changes would be folded to the value that it has while compiling.
_STATEFUL: dict[str, Any] = {"joint_graph_constant_folding": False}
_BY_TARGET = {"cpp.march", "cpp.simdlen", "cpp.cxx"}
_WORDS = {"true": True, "false": False, "none": None}


def settings(options: Iterable[str], march: str | None, compiler: str, *, stateful: bool) -> dict[str, Any]:
    """All settings for one compile. UsageError for an option that torch does not have or of another type.

    `stateful`: the model changes some of its buffers.
    """
    chosen: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise UsageError(f"`--inductor {option}` is not understood", "write it as `--inductor max_autotune=true`")
        if key in _NEEDED:
            raise UsageError(f"`--inductor {key}` cannot be changed: a bundle needs `{key}={_NEEDED[key]!r}`")
        if key in _BY_TARGET:
            raise UsageError(f"`--inductor {key}` cannot be changed", "use `--target`, or the variable CXX")
        chosen[key] = _value(key, text)
    target = {"cpp.cxx": (None, compiler)} | ({} if march is None else {"cpp.march": march})
    return _DEFAULTS | chosen | target | (_STATEFUL if stateful else {}) | _NEEDED


def known_settings(chosen: dict[str, Any], note: torch_private.Note) -> dict[str, Any]:
    """Those that the torch at hand has. CompileError where one lacks that a bundle needs; of others a note is left."""
    known = torch_private.options()
    for key in chosen.keys() - known.keys():
        if key in _NEEDED:
            raise torch_private.unknown(f"has no option `{key}` of inductor, without which there is no bundle")
        note(f"{torch_private.installed()} has no option `{key}` of inductor, which mctl sets to {chosen[key]!r}")
    return {key: value for key, value in chosen.items() if key in known}


def _value(key: str, text: str) -> Any:
    known = torch_private.options()
    if key not in known:
        near = difflib.get_close_matches(key, known, 4) or [name for name in known if name.endswith(f".{key}")]
        hint = f"near it: {', '.join(f'`{name}`' for name in near)}" if near else f"see `{torch_private.OPTIONS}`"
        raise UsageError(f"inductor has no option `{key}`", hint)
    declared = torch_private.option_type(key)
    allowed = get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)
    if allowed == (type(None),):  # torch declares no type
        allowed = (bool, int, float, str, type(None))
    value = parse(text, allowed)
    if value is _NO_VALUE:
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise UsageError(f"`--inductor {key}` takes {names}, not `{text}`")
    return value


_NO_VALUE = object()


def parse(text: str, allowed: Iterable[Any]) -> Any:
    """`text` as the first of the allowed types that it fits."""
    kinds = {get_origin(kind) or kind for kind in allowed}
    word = _WORDS.get(text.lower(), _NO_VALUE)
    if word is not _NO_VALUE and type(word) in kinds:
        return word
    if int in kinds and text.lstrip("-").isdecimal():
        return int(text)
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            pass
    if list in kinds:
        return text.split(",")
    return text if str in kinds else _NO_VALUE

"""Where a model for generation comes from: a Hugging Face folder, or a Python file."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ..bundle_format import manifest
from ..bundle_format.errors import ExportError, UsageError
from ..export.source import load_source
from ..export.usercode import describe, quiet

TOKENIZER = "tokenizer.json"  # of a folder
_CONTEXTS = ("max_position_embeddings", "n_positions", "block_size", "context_length", "max_seq_len")


@dataclass(frozen=True, slots=True)
class Found:
    """A model in eval mode and float32, and what its files say of it."""

    module: nn.Module
    record: manifest.Source
    context: int | None
    eos: tuple[int, ...]
    tokenizer: bytes | None = None  # tokenizer.json


def load(spec: str, *, weights: Path | None = None, seed: int = 0) -> Found:
    """A folder that transformers' `save_pretrained` wrote, or `MODEL.py[:NAME]`. UsageError, ExportError."""
    folder = Path(spec)
    if not folder.is_dir():
        source = load_source(spec, weights=weights, seed=seed)
        return Found(
            source.model.float(), source.record, *_said_by(getattr(source.model, "config", None), source.model)
        )
    if weights is not None:
        raise UsageError("`--weights` goes with a Python file: a folder has its own")
    return _load_folder(folder)


def _load_folder(folder: Path) -> Found:
    ggufs = sorted(folder.glob("*.gguf"))
    config = folder / "config.json"
    if not config.is_file() and len(ggufs) != 1:
        hint = "it has to be what `save_pretrained` wrote, or hold one `.gguf` file"
        raise UsageError(f"`{folder}` has no `config.json`", hint)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ExportError("reading a folder needs transformers", "install it: `pip install transformers`") from None
    options: dict[str, Any] = {} if config.is_file() else {"gguf_file": ggufs[0].name}
    if config.is_file():
        _refuse_other_tasks(config)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, attn_implementation="eager", **options
            )
    except Exception as error:
        raise ExportError(f"transformers cannot read `{folder}`: {describe(error)}") from error
    files = [folder / ggufs[0].name] if options else sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    record = manifest.Source(
        file=folder.resolve().name,
        sha256=_sha256([files[0] if options else config]),
        model=type(model).__name__,
        seed=0,
        weights=files[0].name if files else "",
        weights_sha256=_sha256(files) if files else "",
    )
    context, eos = _said_by(model.config, model)
    return Found(model.eval(), record, context, eos, _tokenizer(folder, options))


def _tokenizer(folder: Path, options: dict[str, Any]) -> bytes | None:
    """The folder's tokenizer.json, or that of a .gguf file."""
    path = folder / TOKENIZER
    if path.is_file() or not options:
        return path.read_bytes() if path.is_file() else None
    from transformers import AutoTokenizer

    try:
        with quiet():
            known = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        text: str = known.backend_tokenizer.to_str()
    except Exception:  # whatever transformers lacks for it: prompts are tokens then
        return None
    return text.encode()


def _refuse_other_tasks(config: Path) -> None:
    try:
        said = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ExportError(f"`{config}` is no sound JSON: {error}") from None
    if said.get("is_encoder_decoder"):
        names = ", ".join(said.get("architectures") or ["the model"])
        raise ExportError(f"{names} is an encoder with a decoder", "only decoders can be exported so far")


def _said_by(config: Any, model: nn.Module) -> tuple[int | None, tuple[int, ...]]:
    """The context and the tokens that end a text, as configuration or model say."""
    owners = [getattr(config, "get_text_config", lambda: config)(), config, model]
    numbers = [getattr(owner, name, None) for owner in owners for name in _CONTEXTS]
    context = next((number for number in numbers if isinstance(number, int) and number > 0), None)
    ends = [getattr(owner, "eos_token_id", None) for owner in (getattr(model, "generation_config", None), config)]
    found = next((end for end in ends if end is not None), ())
    return context, tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _sha256(files: Iterable[Path]) -> str:
    """Of the contents, one after another."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()

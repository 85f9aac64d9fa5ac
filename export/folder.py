"""A Hugging Face folder and a task: a wrapper round the model, dims, pads and example, and mctl's handler for it."""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from ..bundle_format import manifest
from ..bundle_format.errors import ExportError, UsageError
from ..bundle_format.handler_files import HandlerFiles, stock
from ..bundle_format.task import TASK_FILE, TASKS, TOKENIZER_FILE, TaskSettings
from .dims import DimSpec
from .usercode import describe, quiet

_BATCH = (1, 32)  # rows
_UNKNOWN_LENGTH = 100_000  # a tokenizer that says more does not know
_DEFAULT_LENGTH = 512


@dataclass(frozen=True, slots=True)
class TaskModel:
    """What `load_source` makes a source of."""

    module: nn.Module
    example: dict[str, torch.Tensor]
    dims: tuple[DimSpec, ...]
    pads: dict[str, int | float]
    record: manifest.Source
    settings: TaskSettings
    tokenizer: bytes | None
    task: str

    def handler_files(self) -> HandlerFiles:
        files = [(TASK_FILE, msgspec.json.format(msgspec.json.encode(self.settings), indent=1))]
        files += [(TOKENIZER_FILE, self.tokenizer)] if self.tokenizer else []
        return stock(self.task, files)


def split_folder(spec: str) -> tuple[Path, str] | None:
    """Folder and task of `FOLDER:text-embedding`; None for anything else."""
    folder, colon, task = spec.rpartition(":")
    return (Path(folder), task) if colon and task in TASKS else None


def load_folder(folder: Path, task: str) -> TaskModel:
    """Reads what `save_pretrained` wrote, or sentence-transformers. UsageError, ExportError say what is in the way."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"`{folder}` has no `config.json`", "give the folder that `save_pretrained` wrote")
    try:
        import transformers
    except ImportError:
        raise ExportError("reading a folder needs transformers", "install it: `pip install transformers`") from None
    return (
        _image_model(folder, task, transformers)
        if task.startswith("image")
        else _text_model(folder, task, transformers)
    )


# --- texts -------------------------------------------------------------------------------------------------------


def _text_model(folder: Path, task: str, transformers: Any) -> TaskModel:
    kinds = {
        "text-embedding": transformers.AutoModel,
        "text-classification": transformers.AutoModelForSequenceClassification,
        "token-classification": transformers.AutoModelForTokenClassification,
    }
    model = _pretrained(kinds[task], folder)
    _refuse_fresh_weights(model, folder, task)
    known = _tokenizer(folder, transformers)
    parts = _sentence_parts(folder) if task == "text-embedding" else _Parts()
    longest = _longest(model, known)
    names = _inputs_of(model, known, task)
    module = Embedder(model, parts) if task == "text-embedding" else Logits(model)
    pad = known.pad_token_id if known.pad_token_id is not None else 0
    settings = TaskSettings(
        labels=() if task == "text-embedding" else _labels(model.config),
        max_tokens=min(filter(None, (parts.max_tokens, longest))),
        scores=_scores(model.config) if task == "text-classification" else "softmax",
    )
    places = tuple((name, 1) for name in names)
    dims = (DimSpec("batch", *_BATCH, 1, tuple((name, 0) for name in names)), DimSpec("seq", 1, longest, 1, places))
    return TaskModel(
        module=module,
        example=_example(names, known, pad, longest),
        dims=dims,
        pads={name: pad if name == "input_ids" else 0 for name in names},
        record=_record(folder, task),
        settings=settings,
        tokenizer=_tokenizer_bytes(known, folder),
        task=task,
    )


class Logits(nn.Module):  # type: ignore[misc]
    """A text classifier's logits, of each text or of each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return {"logits": self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits}


class ImageLogits(nn.Module):  # type: ignore[misc]
    """An image classifier's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.model(pixel_values=pixel_values).logits}


class Embedder(nn.Module):  # type: ignore[misc]
    """One vector a text: pooled and, if so, normalised as sentence-transformers does."""

    def __init__(self, model: nn.Module, parts: "_Parts") -> None:
        super().__init__()
        self.model = model
        self.pooling = parts.pooling
        self.normalize = parts.normalize

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = torch.cat([_POOLING[name](hidden, mask) for name in self.pooling], dim=-1)
        return {"embedding": F.normalize(pooled, dim=-1) if self.normalize else pooled}


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)


def _mean_of_root(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9).sqrt()


def _max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask == 0, float("-inf")).amax(dim=1)


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


_POOLING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_of_root,
    "max": _max,
    "cls": _first,
}


@dataclass(frozen=True, slots=True)
class _Parts:
    """What sentence-transformers puts behind the model."""

    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    max_tokens: int | None = None


def _sentence_parts(folder: Path) -> _Parts:
    """As modules.json and the files it names say; the mean, not normalised, where there are none."""
    modules = _json(folder / "modules.json", [])
    if not modules:
        return _Parts()
    pooling: tuple[str, ...] = ("mean",)
    normalize = False
    for module in modules[1:]:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling_of(_json(folder / str(module.get("path", "")) / "config.json", {}))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise ExportError(
                f"`{folder.name}` has a module `{kind}` of sentence-transformers, which mctl does not have",
                "write the whole model as an `nn.Module`, and export that",
            )
    longest = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    return _Parts(pooling, normalize, longest if isinstance(longest, int) else None)


_FLAGS = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


def _pooling_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The ways to pool, in sentence-transformers' order: by one name, or by flags as older versions wrote them."""
    mode = config.get("pooling_mode")
    flagged = [ours for flag, ours in _FLAGS.items() if config.get(f"pooling_mode_{flag}")]
    wanted = [mode] if isinstance(mode, str) else list(mode or flagged)
    for name in wanted:
        if name not in _POOLING:
            raise ExportError(
                f"the folder pools by `{name}`, which mctl does not have", "write the model as an `nn.Module`"
            )
    return tuple(wanted) or ("mean",)


def _inputs_of(model: nn.Module, known: Any, task: str) -> tuple[str, ...]:
    """What the model takes of what its tokenizer makes; types only where texts may come in pairs."""
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" not in taken:
        raise ExportError(f"{type(model).__name__} takes no `attention_mask`", "write a wrapper and export that")
    types = task == "text-classification" and getattr(model.config, "type_vocab_size", 0) > 1
    types = types and "token_type_ids" in taken and "token_type_ids" in known.model_input_names
    return ("input_ids", "attention_mask", "token_type_ids") if types else ("input_ids", "attention_mask")


def _longest(model: nn.Module, known: Any) -> int:
    """Tokens of a text at most: what the positions allow, and what the tokenizer says."""
    limits = [_DEFAULT_LENGTH] if not hasattr(model.config, "max_position_embeddings") else []
    limits += [int(model.config.max_position_embeddings)] if not limits else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            skipped = module.padding_idx + 1 if module.padding_idx is not None else 0
            limits.append(module.num_embeddings - skipped)
    if 1 < known.model_max_length < _UNKNOWN_LENGTH:
        limits.append(int(known.model_max_length))
    return min(limits)


def _example(names: tuple[str, ...], known: Any, pad: int, longest: int) -> dict[str, torch.Tensor]:
    """Two texts, the second one padded."""
    length = min(7, longest)
    ids = torch.arange(2 * length).reshape(2, length) % max(len(known) - 1, 1)
    ids = torch.where(ids == pad, ids + 1, ids)
    ids[1, (length + 1) // 2 :] = pad
    made = {"input_ids": ids, "attention_mask": (ids != pad).long(), "token_type_ids": torch.zeros_like(ids)}
    if "token_type_ids" in names:
        made["token_type_ids"][0, length // 2 :] = 1
    return {name: made[name] for name in names}


def _tokenizer(folder: Path, transformers: Any) -> Any:
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ExportError(f"transformers cannot read the tokenizer of `{folder}`: {describe(error)}") from error


def _tokenizer_bytes(known: Any, folder: Path) -> bytes:
    """The tokenizer as it works in transformers, which may set what tokenizer.json alone does not say."""
    backend = getattr(known, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(
            f"the tokenizer of `{folder}` is Python code: {type(known).__name__}",
            "mctl's handlers need one that can be saved as tokenizer.json",
        )
    text: str = backend.to_str()
    return text.encode()


# --- images ------------------------------------------------------------------------------------------------------


def _image_model(folder: Path, task: str, transformers: Any) -> TaskModel:
    model = _pretrained(transformers.AutoModelForImageClassification, folder)
    _refuse_fresh_weights(model, folder, task)
    said = _json(folder / "preprocessor_config.json", {})
    resize, crop, (height, width) = _image_sizes(said)
    normalize = said.get("do_normalize", True)
    settings = TaskSettings(
        labels=_labels(model.config),
        scores=_scores(model.config),
        resize=resize,
        crop=crop,
        resample=int(said.get("resample", 2)),
        scale=float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else 1.0,
        mean=tuple(said.get("image_mean", (0.5, 0.5, 0.5))) if normalize else (0.0, 0.0, 0.0),
        deviation=tuple(said.get("image_std", (0.5, 0.5, 0.5))) if normalize else (1.0, 1.0, 1.0),
    )
    return TaskModel(
        module=ImageLogits(model),
        example={"pixel_values": torch.linspace(-1, 1, 2 * 3 * height * width).reshape(2, 3, height, width)},
        dims=(DimSpec("batch", *_BATCH, 1, (("pixel_values", 0),)),),
        pads={},
        record=_record(folder, task),
        settings=settings,
        tokenizer=None,
        task=task,
    )


Size = tuple[int, int]  # height and width


def _image_sizes(said: Mapping[str, Any]) -> tuple[int | Size | None, Size | None, Size]:
    """What an image is resized to, what is cut out of its middle, and what the model gets, by the processor's file."""
    size = said.get("size", 224)
    size = {"height": size, "width": size} if isinstance(size, int) else dict(size)
    crop = _size(said.get("crop_size")) if said.get("do_center_crop") else None
    resizes = said.get("do_resize", True)
    if "height" in size:
        whole = (int(size["height"]), int(size["width"]))
        return (whole if resizes else None), crop or (None if resizes else whole), crop or whole
    if "shortest_edge" not in size:
        raise ExportError(f"the image processor resizes to {size}, which mctl does not have", "write a handler for it")
    edge = int(size["shortest_edge"])
    if crop is None and "crop_pct" in said:  # the processors of ConvNeXt
        whole = (edge, edge)
        return (whole, None, whole) if edge >= 384 else (int(edge / float(said["crop_pct"])), whole, whole)
    if crop is None:
        raise ExportError("the image processor gives images of different sizes", "give it a `crop_size`")
    return edge, crop, crop


def _size(said: Any) -> Size | None:
    """`224`, or `{"height": 224, "width": 224}`."""
    if isinstance(said, Mapping) and "shortest_edge" in said:
        said = said["shortest_edge"]
    return (said, said) if isinstance(said, int) else (int(said["height"]), int(said["width"])) if said else None


# --- what all have -----------------------------------------------------------------------------------------------


def _pretrained(kind: Any, folder: Path) -> Any:
    try:
        with quiet():
            model, loading = kind.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        raise ExportError(f"transformers cannot read `{folder}`: {describe(error)}") from error
    model.missing_weights = sorted(loading["missing_keys"])
    return model.eval()


def _refuse_fresh_weights(model: Any, folder: Path, task: str) -> None:
    """A head that the folder has no weights for would answer at random. A pooler that nobody asks is none."""
    missing = [name for name in model.missing_weights if task != "text-embedding" or "pooler" not in name]
    if missing:
        raise ExportError(
            f"`{folder.name}` has no weights for `{missing[0]}`: it was not trained for {task}",
            "give the folder of a model that was, or name its own task with `--task`",
        )


def _labels(config: Any) -> tuple[str, ...]:
    return tuple(str(config.id2label[at]) for at in range(config.num_labels))


def _scores(config: Any) -> Any:
    """What transformers' pipelines make scores by."""
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _record(folder: Path, task: str) -> manifest.Source:
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return manifest.Source(file=folder.resolve().name, sha256=digest.hexdigest(), model=task, seed=0)


def _json(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"`{path}` is no sound JSON: {error}") from None

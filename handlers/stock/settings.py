"""What a stock handler knows of its model beside the contract: `task.json`, which `mctl build DIR --task` writes."""

from pathlib import Path

import msgspec

from ...bundle_format.errors import HandlerError
from ..api import Context

TASK_FILE = "task.json"
LABELS_FILE = "labels.txt"  # one a line, in its place
TOKENIZER_FILE = "tokenizer.json"

Scores = str  # "softmax", "sigmoid" or "none"


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields are used as a task needs them."""

    labels: tuple[str, ...] = ()
    max_tokens: int | None = None  # of a text; None: as many as the contract allows
    scores: Scores = "softmax"  # what makes scores of logits
    # images
    resize: int | tuple[int, int] | None = 256  # the short side, or height and width
    crop: int | tuple[int, int] | None = 224
    resample: int = 2  # Pillow's number: 2 is bilinear, 3 bicubic
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)

    def label(self, at: int) -> str:
        return self.labels[at] if at < len(self.labels) else f"LABEL_{at}"


def read_settings(context: Context) -> Settings:
    """Of task.json, else what labels.txt says. HandlerError where a file cannot be read."""
    path = context.assets / TASK_FILE
    if path.is_file():
        try:
            return msgspec.json.decode(path.read_bytes(), type=Settings)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HandlerError(f"`{TASK_FILE}` of the handler is not valid: {error}") from None
    labels = context.assets / LABELS_FILE
    return Settings(labels=_lines(labels) if labels.is_file() else ())


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except UnicodeDecodeError:
        raise HandlerError(f"`{path.name}` of the handler is no UTF-8") from None

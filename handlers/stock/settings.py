"""What a stock handler reads beside the contract."""

from pathlib import Path

import msgspec

from ...bundle_format.errors import HandlerError
from ...bundle_format.task import TASK_FILE, TaskSettings
from ..api import Context

LABELS_FILE = "labels.txt"  # one a line, where there is no task.json


def read_settings(context: Context) -> TaskSettings:
    """Of task.json, else what labels.txt says. HandlerError where a file cannot be read."""
    path = context.assets / TASK_FILE
    if path.is_file():
        try:
            return msgspec.json.decode(path.read_bytes(), type=TaskSettings)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HandlerError(f"`{TASK_FILE}` of the handler is not valid: {error}") from None
    labels = context.assets / LABELS_FILE
    return TaskSettings(labels=_lines(labels) if labels.is_file() else ())


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except UnicodeDecodeError:
        raise HandlerError(f"`{path.name}` of the handler is no UTF-8") from None

"""What one of mctl's own handlers knows of its model beside the contract: `task.json` under `mctl/handler/`."""

from typing import Literal, get_args

import msgspec

Task = Literal["text-embedding", "text-classification", "token-classification", "image-classification"]
TASKS: tuple[str, ...] = get_args(Task)

TASK_FILE = "task.json"
TOKENIZER_FILE = "tokenizer.json"  # Hugging Face's


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields are used as a task needs them."""

    labels: tuple[str, ...] = ()
    max_tokens: int | None = None  # of a text; None: as many as the contract allows
    scores: Literal["softmax", "sigmoid", "none"] = "softmax"  # what makes scores of logits
    # images
    resize: int | tuple[int, int] | None = 256  # the short side, or height and width
    crop: int | tuple[int, int] | None = 224
    resample: int = 2  # Pillow's number: 2 is bilinear, 3 bicubic
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)

    def label(self, at: int) -> str:
        return self.labels[at] if at < len(self.labels) else f"LABEL_{at}"

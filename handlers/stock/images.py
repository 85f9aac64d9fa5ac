"""image-classification: a JPEG, PNG or whatever Pillow reads in, the most likely labels out."""

import asyncio
import base64
import binascii
import io
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ...bundle_format.task import TaskSettings
from ..api import BadRequest, Context, Request, route
from ..form import media_type
from ..models import Model
from ..tensors import Array
from .settings import read_settings
from .text import best, scores_of

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_RESAMPLING = {0: "NEAREST", 1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC", 4: "BOX", 5: "HAMMING"}
_MAX_PIXELS = 178956970  # Pillow's own bound, beyond which it takes an image for an attack


def pixels_from(
    image: Any,
    *,
    resize: int | tuple[int, int] | None,
    crop: int | tuple[int, int] | None,
    resample: int = 2,
    scale: float = 1 / 255,
    mean: tuple[float, ...] = _MEAN,
    deviation: tuple[float, ...] = _DEVIATION,
) -> Array:
    """Colours as float32 `[3, height, width]`: `(value * scale - mean) / deviation`.

    `resize`: the short side, or height and width; `crop`: what of the middle is kept.
    """
    image = image.convert("RGB")
    if resize is not None:
        height, width = _resized(image, resize)
        image = image.resize((width, height), getattr(Image.Resampling, _RESAMPLING[resample]))
    if crop is not None:
        height, width = (crop, crop) if isinstance(crop, int) else crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))  # black where the image is smaller
    pixels: Array = np.asarray(image, np.float32) * np.float32(scale)
    pixels = (pixels - np.asarray(mean, np.float32)) / np.asarray(deviation, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _resized(image: Any, resize: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width; of an int, the short side's, the other in proportion (rounded down)."""
    if not isinstance(resize, int):
        return resize
    if image.width <= image.height:
        return int(resize * image.height / image.width), resize
    return resize, int(resize * image.width / image.height)


class ImageClassification:
    """`POST` an image (as the body, or a form's part), get `[{"label", "score"}, …]`; `?top=3` for so many."""

    def __init__(self, context: Context) -> None:
        self.settings: TaskSettings = read_settings(context)
        self.input = context.contract.inputs[0].name
        self.output = context.contract.outputs[0].name

    @route("POST", "/classify")
    async def classify(self, request: Request, model: Model) -> list[dict[str, object]]:
        data = await _image_of(request)
        top = _top_of(request)
        pixels = await asyncio.to_thread(self._pixels, data)
        logits = (await model.call({self.input: pixels[None]}))[self.output][0]
        return best(scores_of(logits, self.settings), self.settings, top)

    def _pixels(self, data: bytes) -> Array:
        try:
            image: Any = Image.open(io.BytesIO(data))
            if image.width * image.height > _MAX_PIXELS:
                raise BadRequest(f"the image has {image.width} x {image.height} pixels, allowed {_MAX_PIXELS}")
            image = ImageOps.exif_transpose(image)  # as the camera was held
        except UnidentifiedImageError:
            raise BadRequest("the body is no image that can be read") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadRequest(f"the image cannot be read: {error}") from None
        settings = self.settings
        return pixels_from(
            image,
            resize=settings.resize,
            crop=settings.crop,
            resample=settings.resample,
            scale=settings.scale,
            mean=settings.mean,
            deviation=settings.deviation,
        )


def _top_of(request: Request) -> int:
    text = request.query.get("top", "5")
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 10**6:
        raise BadRequest(f"`top` is `{text[:40]}`, allowed a whole number from 1")
    return int(text)


async def _image_of(request: Request) -> bytes:
    """The image's bytes: the body, the first part of a form, or base64 in JSON's `image`."""
    kind = media_type(request.headers.get("content-type", ""))
    if kind == "multipart/form-data":
        parts = list((await request.form()).values())
        if not parts:
            raise BadRequest("the form has no part with an image")
        return parts[0].value
    if kind != "application/json":
        return bytes(request.body)
    said = await request.json()
    text = said.get("image") if isinstance(said, dict) else None
    if not isinstance(text, str):
        raise BadRequest("the JSON body has no `image`: send the file itself, or its base64")
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except binascii.Error:
        raise BadRequest("`image` is no base64") from None

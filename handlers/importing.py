"""A TorchServe archive (.mar) taken apart: what is in it, and what has still to be written."""

import ast
import json
import secrets
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle_format.errors import BundleError, UsageError
from ..bundle_format.layout import path_fault
from .loading import STOCK_HANDLERS

MANIFEST = "MAR-INF/MANIFEST.json"
_MAX_FILES, _MAX_BYTES = 10_000, 64 << 30
_LIKE = {  # TorchServe's handlers that go by a name, and what there is in their place
    "image_classifier": "image-classification",
    "text_classifier": "text-classification",
}
_MODEL_ENDINGS = (".pt", ".pth", ".bin", ".safetensors", ".onnx", ".so")


@dataclass(frozen=True, slots=True)
class Imported:
    """What was found in a .mar: paths are those inside `folder`."""

    folder: Path
    name: str
    version: str
    handler: str  # a file, or the name of one of TorchServe's own
    model_file: str  # the Python file with the model's class, or ""
    classes: tuple[str, ...]  # that it defines
    weights: str
    assets: tuple[str, ...]
    requirements: str  # the file, or ""
    notes: tuple[str, ...]
    commands: tuple[str, ...]  # what to type next


def import_mar(mar: Path, output: Path | None) -> Imported:
    """Unpacks into `output` (or a folder called like the model), which must not be there. UsageError, BundleError."""
    try:
        with zipfile.ZipFile(mar) as archive:
            manifest = _manifest(mar, archive)
            model = manifest["model"]
            folder = output or Path(_plain_name(str(model.get("modelName") or mar.stem)))
            if folder.exists():
                raise UsageError(f"there is already a `{folder}`", "choose another folder with `-o`")
            _unpack(mar, archive, folder)
    except zipfile.BadZipFile:
        raise BundleError(
            f"`{mar}` is no .mar: it is not a zip file", "one made with `--archive-format tgz` has to be repacked"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read `{mar}`: {(error.strerror or str(error)).lower()}") from None
    return _described(folder, model)


def _manifest(mar: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    names = [entry.filename for entry in archive.infolist()]
    if MANIFEST not in names:
        raise BundleError(f"`{mar}` is no .mar: it has no `{MANIFEST}`", "give what `torch-model-archiver` wrote")
    try:
        found = json.loads(archive.read(MANIFEST))
    except ValueError as error:
        raise BundleError(f"`{MANIFEST}` of `{mar}` is no sound JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise BundleError(f"`{MANIFEST}` of `{mar}` names no model")
    return found


def _unpack(mar: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    """The files, whole or not at all; no link, nothing outside of the folder."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > _MAX_FILES or sum(entry.file_size for entry in entries) > _MAX_BYTES:
        raise BundleError(f"`{mar}` is too large: allowed are {_MAX_FILES} files and {_MAX_BYTES >> 30} GiB")
    for entry in entries:
        if fault := path_fault(entry.filename):
            raise BundleError(f"`{mar}` holds the path `{entry.filename[:128]}`, which is not allowed: {fault}")
    fresh = folder.parent / f".{folder.name}.{secrets.token_hex(6)}"
    try:
        for entry in entries:
            path = fresh / entry.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("xb") as file:
                shutil.copyfileobj(source, file)
        fresh.rename(folder)
    except (zipfile.BadZipFile, FileExistsError) as error:
        raise BundleError(f"`{mar}` is damaged: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _described(folder: Path, model: Mapping[str, Any]) -> Imported:
    handler = str(model.get("handler") or "")
    model_file, weights = str(model.get("modelFile") or ""), str(model.get("serializedFile") or "")
    requirements = str(model.get("requirementsFile") or "")
    own = {handler.partition(":")[0], model_file, weights, requirements, MANIFEST}
    assets = tuple(
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in own
    )
    classes = _classes(folder / model_file) if model_file else ()
    notes = _notes(folder, handler, model_file, weights, requirements)
    return Imported(
        folder=folder,
        name=_plain_name(str(model.get("modelName") or folder.name)),
        version=str(model.get("modelVersion") or "1"),
        handler=handler,
        model_file=model_file,
        classes=classes,
        weights=weights,
        assets=assets,
        requirements=requirements,
        notes=notes,
        commands=_commands(folder, handler, model_file, weights, classes, assets),
    )


def _notes(folder: Path, handler: str, model_file: str, weights: str, requirements: str) -> tuple[str, ...]:
    notes = []
    if not model_file:
        what = f"`{weights}` is TorchScript, or needs a class that is not here" if weights else "there are no weights"
        notes.append(f"the archive has no model code ({what}): the export needs it, so write a `model.py`")
    notes.append("the model file needs `example_inputs` beside `model`: docs/first-model.md")
    if handler and not (folder / handler.partition(":")[0]).is_file():
        ours = _LIKE.get(handler)
        instead = f"mctl's own `{ours}` is like it" if ours else "write it as a file: `mctl handler new`"
        notes.append(f"the handler `{handler}` is one of TorchServe's own: {instead}")
    if requirements:
        notes.append(f"the handler's packages are not installed by a server: `pip install -r {folder / requirements}`")
    return tuple(notes)


def _commands(
    folder: Path, handler: str, model_file: str, weights: str, classes: tuple[str, ...], assets: tuple[str, ...]
) -> tuple[str, ...]:
    source = f"{folder / model_file}:{classes[0]}" if len(classes) == 1 else f"{folder}/model.py"
    state = f" --weights {folder / weights}" if model_file and weights else ""
    file = handler.partition(":")[0]
    ours = str(folder / file) if (folder / file).is_file() else _LIKE.get(handler, "handler.py")
    assert ours in STOCK_HANDLERS or ours.endswith(".py") or (folder / file).is_file()
    carried = "".join(f" --asset {folder / top}" for top in dict.fromkeys(_tops(assets)))
    return (
        f"mctl export {source}{state} --dim batch=1:32 -o program.pt2",
        f"mctl compile program.pt2 -o bundle.pt2 --handler {ours}{carried}",
        "mctl serve bundle.pt2 --allow-handler",
    )


def _tops(assets: tuple[str, ...]) -> list[str]:
    """Files and folders at the top; weights are in the bundle already."""
    return [name.partition("/")[0] for name in assets if not name.endswith(_MODEL_ENDINGS)]


def _classes(path: Path) -> tuple[str, ...]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ()
    return tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))


def _plain_name(name: str) -> str:
    from ..bundle_format.manifest import name_from

    return name_from(name)

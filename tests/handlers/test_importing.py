"""TorchServe archives: what is in one, and what is no archive."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.bundle_format.errors import MctlError
from mctl.handlers.importing import import_mar

Maker = Callable[..., object]


def mar(path: Path, model: object, **files: str) -> Path:
    """As torch-model-archiver writes it: everything at the top, and MAR-INF/MANIFEST.json."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"createdOn": "", "runtime": "python", "model": model}))
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)
    return path


MODEL = {
    "modelName": "my words", "modelVersion": "2.0", "serializedFile": "words.pt", "modelFile": "net.py",
    "handler": "text.py", "requirementsFile": "requirements.txt",
}  # fmt: skip


def test_an_archive_with_a_model_file(tmp_path: Path, mctl_ok: Maker) -> None:
    files = {
        "words__pt": "w",
        "net__py": "class Net: pass\n",
        "text__py": "h",
        "requirements__txt": "r",
        "vocab__json": "{}",
    }
    mar(tmp_path / "words.mar", MODEL, **files)
    done = mctl_ok("import", "torchserve", "words.mar", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (said["folder"], said["name"], said["version"]) == ("my_words", "my_words", "2.0")
    assert (said["model_file"], said["classes"], said["weights"]) == ("net.py", ["Net"], "words.pt")
    assert said["assets"] == ["vocab.json"] and said["commands"] == [
        "mctl export my_words/net.py:Net --weights my_words/words.pt --dim batch=1:32 -o program.pt2",
        "mctl compile program.pt2 -o bundle.pt2 --handler my_words/text.py --asset my_words/vocab.json",
        "mctl serve bundle.pt2 --allow-handler",
    ]
    assert any("pip install -r my_words/requirements.txt" in note for note in said["notes"])
    assert (tmp_path / "my_words" / "vocab.json").read_text() == "{}"
    again = mctl_ok("import", "torchserve", "words.mar", "-o", "other", cwd=tmp_path)
    assert "code      net.py (Net)" in again.stdout and "note: the model file needs `example_inputs`" in again.stdout


def test_a_named_handler_and_torchscript(tmp_path: Path) -> None:
    path = mar(
        tmp_path / "a.mar",
        {"modelName": "a", "serializedFile": "a.pt", "handler": "image_classifier"},
        a__pt="x",
        index_to_name__json="{}",
    )
    found = import_mar(path, tmp_path / "a")
    notes = "\n".join(found.notes)
    assert "the archive has no model code (`a.pt` is TorchScript, or needs a class that is not here)" in notes
    assert "`image_classifier` is one of TorchServe's own: mctl's own `image-classification` is like it" in notes
    assert f"--handler image-classification --asset {tmp_path}/a/index_to_name.json" in found.commands[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../outside", "which is not allowed: it has an empty part"),
        ("/etc/passwd", "which is not allowed: it is absolute"),
        ("a//b", "which is not allowed"),
    ],
)
def test_paths_that_lead_elsewhere(tmp_path: Path, name: str, said: str) -> None:
    path = mar(tmp_path / "a.mar", {"modelName": "a"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "x")
    with pytest.raises(MctlError, match=said):
        import_mar(path, tmp_path / "a")
    assert [each.name for each in tmp_path.iterdir()] == ["a.mar"]


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "text.mar").write_text("hello")
    with pytest.raises(MctlError, match=r"text.mar` is no .mar: it is not a zip file"):
        import_mar(tmp_path / "text.mar", None)
    with pytest.raises(MctlError, match=r"cannot read `.*gone.mar`: no such file"):
        import_mar(tmp_path / "gone.mar", None)
    with zipfile.ZipFile(tmp_path / "plain.mar", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(MctlError, match=r"plain.mar` is no .mar: it has no `MAR-INF/MANIFEST.json`"):
        import_mar(tmp_path / "plain.mar", None)
    with pytest.raises(MctlError, match="names no model"):
        import_mar(mar(tmp_path / "m.mar", 5), None)
    (tmp_path / "there").mkdir()
    with pytest.raises(MctlError, match="there is already a"):
        import_mar(mar(tmp_path / "n.mar", {"modelName": "n"}), tmp_path / "there")

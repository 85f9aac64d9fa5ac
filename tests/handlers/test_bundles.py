"""Bundles with a handler: stored, shown, taken out again, and asked without a server."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mctl.bundle_format.archive import open_bundle, rewrite
from mctl.bundle_format.errors import HandlerError, MctlError, UsageError
from mctl.bundle_format.handler_files import HandlerFiles, with_handler
from mctl.handlers import carrying, unpacking
from mctl.handlers.templates import write_template

from .front import started

Maker = Callable[..., object]

HANDLER = """
from mctl.handlers import BadRequest, route
from helper import chosen

requirements = ["numpy", "msgspec >= 0.1"]

class Labels:
    def __init__(self, context):
        self.labels = (context.assets / "words" / "labels.txt").read_text().split()

    @route("POST", "/label")
    async def label(self, request, model):
        said = await request.json()
        outputs = await model(x=[said["x"]])
        return {"label": chosen(self.labels, outputs), "of": len(self.labels)}

    @route("POST", "/stream")
    async def stream(self, request, model):
        for x in await request.json():
            yield {"y": (await model(x=[x]))["output"][0]}
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "label.py").write_text(HANDLER)
    (folder / "helper.py").write_text(
        "def chosen(labels, outputs):\n    return labels[int(outputs['output'][0].argmax())]\n"
    )
    (folder / "words").mkdir()
    (folder / "words" / "labels.txt").write_text("\n".join(f"word{at}" for at in range(10)))
    return folder


@pytest.fixture(scope="module")
def labelled(parts: Path, mlp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLP's bundle as `mctl compile --handler label.py --asset helper.py --asset words` would write it."""
    path = tmp_path_factory.mktemp("labelled") / "labelled.pt2"
    return with_files(
        mlp_bundle, carrying.collect(str(parts / "label.py"), [parts / "helper.py", parts / "words"]), path
    )


def with_files(bundle: Path, files: HandlerFiles, path: Path) -> Path:
    with open_bundle(bundle) as archive:
        rewrite(archive, path, with_handler(archive.manifest, files), dict(files.members))
    return path


def _expected(mlp_bundle: Path, x: np.ndarray) -> np.ndarray:
    from mctl.runner import load

    with load(mlp_bundle) as session:
        return session(x=x[None])["output"][0]


def test_the_manifest_says_what_it_brings(labelled: Path) -> None:
    import msgspec

    with open_bundle(labelled) as archive:
        manifest = archive.manifest
        handler = manifest.handler
        assert handler is not None and manifest.needs == ("handler",) and manifest.schema == "mctl.bundle/2"
        assert handler.source == "mctl/handler/label.py" and not handler.is_stock
        assert handler.assets == ("mctl/handler/helper.py", "mctl/handler/words/labels.txt")
        assert handler.requirements == (f"numpy=={np.__version__}", f"msgspec=={msgspec.__version__}")
        assert handler.python == ".".join(map(str, sys.version_info[:3]))
        archive.verify("mctl/handler/label.py")


def test_inspect_is_loud(labelled: Path, mlp_bundle: Path, mctl_ok: Maker, tmp_path: Path) -> None:
    said = mctl_ok("inspect", labelled).stdout
    assert "PYTHON CODE that this file brings: label.py" in said and "--allow-handler" in said
    assert "words/labels.txt" in said
    stock = tmp_path / "stock.pt2"
    (tmp_path / "labels.txt").write_text("a\nb\n")
    with_files(mlp_bundle, carrying.collect("text-classification", [tmp_path / "labels.txt"]), stock)
    quiet = mctl_ok("inspect", stock).stdout
    assert "handler text-classification, mctl's own" in " ".join(quiet.split())
    assert "PYTHON CODE" not in quiet


def test_one_request_without_a_server(
    labelled: Path, parts: Path, mlp_bundle: Path, mctl_ok: Maker, run_mctl: Maker, tmp_path: Path
) -> None:
    x = np.linspace(-1, 1, 128, dtype=np.float32)
    label = f"word{_expected(mlp_bundle, x).argmax()}"
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"x": x.tolist()}))
    said = mctl_ok("run", labelled, "--handler", "bundle", "--request", request)
    assert json.loads(said.stdout) == {"label": label, "of": 10} and said.stderr.startswith("200 ")
    beside = mctl_ok(
        "run", mlp_bundle, "--handler", parts / "label.py", "--request", request, "--path", "/label", "--json"
    )
    whole = json.loads(beside.stdout)
    assert whole["ok"] and json.loads(whole["body"]) == {"label": label, "of": 10}
    refused = run_mctl("run", labelled, "--request", request)
    assert refused.returncode == 2 and "run it with `--handler bundle`, if you trust it" in refused.stderr
    request.write_text(json.dumps({"x": [1.0]}))
    wrong = run_mctl("run", labelled, "--handler", "bundle", "--request", request)
    assert wrong.returncode == 1 and json.loads(wrong.stdout)["error"].startswith("input 'x': axis 1 is 1, allowed")
    request.write_text(json.dumps([x.tolist()] * 2))
    stream = mctl_ok("run", labelled, "--handler", "bundle", "--request", request, "--path", "/stream")
    events = [json.loads(line.removeprefix("data: "))["y"] for line in stream.stdout.split("\n\n") if line.strip()]
    assert np.allclose(events, [_expected(mlp_bundle, x)] * 2)


def test_the_process_takes_it_out_of_the_bundle(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    contract = {
        "dims": [],
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1, 2]}],
        "outputs": [{"name": "output", "dtype": "float32", "shape": [1, 10]}],
    }
    model = lambda call, inputs: {"output": np.eye(10, dtype=np.float32)[[3]]}  # noqa: E731
    for _ in range(2):  # the second one finds the files
        with started("bundle", model, bundle=str(labelled), contract=contract) as front:
            assert front.ready["t"] == "ready", front.ready
            assert front.ask_json({"x": [1, 2]}) == (200, {"label": "word3", "of": 10})
    (kept,) = (tmp_path / "mctl" / "handlers").iterdir()
    assert sorted(path.name for path in kept.iterdir() if path.name != "__pycache__") == [
        "helper.py",
        "label.py",
        "words",
    ]


def test_files_that_were_changed_are_not_used(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, record = unpacking.unpack_handler(labelled)
    assert record is not None and folder.parent == tmp_path / "mctl" / "handlers"
    (folder / "helper.py").write_text("import os\n")
    again, _ = unpacking.unpack_handler(labelled)
    assert again == folder and "argmax" in (again / "helper.py").read_text()
    folder.parent.chmod(0o777)  # somebody else may write there
    elsewhere, _ = unpacking.unpack_handler(labelled)
    assert tmp_path not in elsewhere.parents and "argmax" in (elsewhere / "helper.py").read_text()


def test_a_damaged_handler_is_not_loaded(labelled: Path, writable: Callable[[Path], Path]) -> None:
    copy = writable(labelled)
    data = copy.read_bytes()
    copy.write_bytes(data.replace(b"class Labels:", b"class Ladels:"))
    with pytest.raises(MctlError, match="does not have the SHA-256"):
        unpacking.unpack_handler(copy)


@pytest.mark.parametrize(
    ("handler", "assets", "error", "said"),
    [
        ("nothing.py", [], UsageError, "there is no handler `.*nothing.py`"),
        ("stock:nothing", [], HandlerError, "there is no stock handler `nothing`"),
        ("h.py", ["gone.txt"], UsageError, "there is no file `.*gone.txt`"),
        ("h.py", ["h.py"], UsageError, "`h.py` is the handler, and the name of an asset too"),
        ("h.py", ["a/x.txt", "b/x.txt"], UsageError, "two assets have the name `x.txt`"),
        ("bad.py", [], HandlerError, "`bad.py` is no Python: invalid syntax"),
        ("needs.py", [], HandlerError, "the handler needs `no-such-package`, which is not installed"),
        ("list.py", [], HandlerError, "`requirements` of `list.py` is no list of texts"),
    ],
)
def test_what_cannot_be_carried(
    tmp_path: Path, handler: str, assets: list[str], error: type[MctlError], said: str
) -> None:
    for name, text in {
        "h.py": "", "bad.py": "def f(:", "needs.py": "requirements = ['no-such-package>=1']", "list.py":
        "requirements = [n for n in ()]", "a/x.txt": "", "b/x.txt": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = handler if handler.startswith("stock:") else str(tmp_path / handler)
    with pytest.raises(error, match=said):
        carrying.collect(path, [tmp_path / name for name in assets])


@pytest.mark.parametrize("kind", ["routes", "torchserve", "stream"])
def test_what_handler_new_writes_works(tmp_path: Path, kind: str) -> None:
    path = write_template(tmp_path / "my_words.py", kind)
    with pytest.raises(UsageError, match="there is a file"):
        write_template(path, kind)
    rows = {"routes": {"x": [[1, 2]]}, "torchserve": [1, 2], "stream": [{"x": [[1, 2]]}]}[kind]
    lone = {"outputs": [{"name": "output", "dtype": "float32", "shape": ["batch", 2]}]}
    from .front import CONTRACT

    model = lambda call, inputs: {"output": inputs["x"] * 2}  # noqa: E731
    with started(path, model, contract={**CONTRACT, **lone}) as front:
        front.request(1, rows, headers=[["content-type", "application/json"]])
        frames = list(front.stream(1))
    body = b"".join(data for _, data in frames)
    assert json.loads(body.removeprefix(b"data: ")) == ([2, 4] if kind == "torchserve" else {"output": [[2, 4]]})


def test_handler_new(mctl_ok: Maker, run_mctl: Maker, tmp_path: Path) -> None:
    assert mctl_ok("handler", "new", "words", cwd=tmp_path).stderr.startswith("wrote words.py")
    assert "class Words" in (tmp_path / "words.py").read_text()
    done = run_mctl("handler", "new", "two words", cwd=tmp_path)
    assert done.returncode == 2 and "cannot be the name of a class" in done.stderr

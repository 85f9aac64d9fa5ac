"""`mctl build`: one gate, one report; options from a file, the command line winning."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import UsageError
from mctl.cli import config
from mctl.cli.config import Option
from mctl.parity.check import check_bundle

from ..parity.faults import with_weights

Run = Callable[..., "CompletedProcess[str]"]

# A bf16 network (fine: it only rounds) and a softmax over the batch (so that rows cannot be joined).
MODEL = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).bfloat16()

    def forward(self, x):
        logits = self.net(x)
        return {"logits": logits, "share": torch.softmax(logits.float(), dim=0)}

model = Mixed
example_inputs = (torch.randn(3, 16, dtype=torch.bfloat16),)
"""
CONFIG = """
[tool.other]
dim = 3

[tool.mctl]
model = "model.py"
dim = "batch=1:8"
name = "from-the-file"
model-version = 7
html = "report.html"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, run_mctl: Run) -> tuple[Path, "CompletedProcess[str]"]:
    folder = tmp_path_factory.mktemp("build with ünïcode")
    (folder / "model.py").write_text(MODEL)
    (folder / "pyproject.toml").write_text(CONFIG)
    return folder, run_mctl("build", "--name", "from-the-command", "-o", "made.pt2", "--json", cwd=folder)


def test_what_it_makes(built: tuple[Path, "CompletedProcess[str]"]) -> None:
    folder, done = built
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir() if path.suffix != "") == [
        *("made.pt2", "model.py", "pyproject.toml", "report.html"),
    ]
    with open_bundle(folder / "made.pt2") as archive:
        manifest = archive.manifest
        report = json.loads(archive.read("extra/mctl/report.json"))
    assert (manifest.name, manifest.version, manifest.parity) == ("from-the-command", "7", "pass")
    assert report["reference"] == "live eager of model.py:model"
    told = json.loads(done.stdout)
    assert told["ok"] is True and told["path"] == "made.pt2" and told["parity"]["verdict"] == "pass"


def test_rows_that_depend_on_each_other_are_not_batched(built: tuple[Path, "CompletedProcess[str]"]) -> None:
    with open_bundle(built[0] / "made.pt2") as archive:
        contract, buckets, notes = archive.manifest.contract, archive.manifest.buckets, archive.manifest.notes
    assert contract.batch_dim is None and "batch" not in buckets
    assert "rows of a batch depend on each other" in contract.batch_note
    assert any("not batchable" in note for note in notes)


def test_bf16_that_is_fine_and_that_is_not(built: tuple[Path, "CompletedProcess[str]"], tmp_path: Path) -> None:
    def coarsen(name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype is torch.bfloat16:
            tensor.mul_(1.04)

    good = built[0] / "made.pt2"
    assert check_bundle(good).verdict == "pass"
    assert check_bundle(with_weights(good, tmp_path / "coarse.pt2", coarsen)).verdict == "differs"


def test_an_unknown_key_in_the_file(tmp_path: Path, run_mctl: Run) -> None:
    (tmp_path / "mctl.toml").write_text('modle = "model.py"')
    done = run_mctl("build", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: `mctl.toml`: unknown key `modle`"
    assert "did you mean `model`?" in done.stderr


def test_the_model_is_asked_for(tmp_path: Path, run_mctl: Run) -> None:
    done = run_mctl("build", cwd=tmp_path)
    assert done.returncode == 2 and "MODEL.py" in done.stderr


def test_an_output_that_cannot_be_written_is_said_at_once(tmp_path: Path, run_mctl: Run) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = run_mctl("build", "model.py", "--dim", "batch=1:8", "-o", "nowhere/made.pt2", cwd=tmp_path)
    assert done.returncode == 2 and "error: cannot write `nowhere/made.pt2`: there is no folder" in done.stderr


# --- the file ----------------------------------------------------------------------------------------------------

GATE = {"dim": Option(many=True), "model_version": Option(), "name": Option(), "allow_random": Option()}
GATE |= {"standalone": Option(yes="yes"), "model": Option(is_path=True), "output": Option(is_path=True)}
KNOWN = {"build": GATE, "export": GATE, "compile": GATE, "serve": {"port": Option(), "no_verify": Option()}}


def options_of(folder: Path, verb: str = "build") -> dict[str, config.Value]:
    found = config.load(folder, verb, KNOWN)
    assert found is not None
    return found.options


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ('dim = "batch=1:8"', {"dim": ["batch=1:8"]}),
        ('dim = ["a=1:8", "b=1:2"]', {"dim": ["a=1:8", "b=1:2"]}),
        ("model-version = 3", {"model_version": "3"}),
        ("model_version = '3'", {"model_version": "3"}),
        ("allow-random = true", {"allow_random": True}),
        ("allow-random = false", {"allow_random": False}),
        ("standalone = true", {"standalone": "yes"}),
        ("standalone = false", {}),
        ("standalone = 'auto'", {"standalone": "auto"}),
        ("[build]\nname = 'own'", {"name": "own"}),
        ("name = 'all'\n[build]\nname = 'own'\n[serve]\nport = 9", {"name": "own"}),
    ],
)
def test_values(tmp_path: Path, text: str, options: dict[str, object]) -> None:
    (tmp_path / "mctl.toml").write_text(text)
    assert options_of(tmp_path) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dims = 3", "unknown key `dims`"),
        ("port = 3", "unknown key `port`"),
        ("[serve]\nprot = 3", "unknown key `prot`"),
        ("name = ['a', 'b']", "`name` takes one value, not a list"),
        ("name = {a = 1}", "`name` is neither text, a number, true or false, nor a list of those"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mctl.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        options_of(tmp_path)
    assert caught.value.message == f"`{tmp_path / 'mctl.toml'}`: {message}"


@pytest.mark.parametrize("text", [b"name = ", b"name = '\xff'"])
def test_a_file_that_is_no_toml(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "mctl.toml").write_bytes(text)
    with pytest.raises(UsageError, match=r"cannot read `.*mctl\.toml`: "):
        options_of(tmp_path)


def test_each_verb_takes_what_is_for_it(tmp_path: Path) -> None:
    (tmp_path / "mctl.toml").write_text("name = 'all'\noutput = 'made.pt2'\n[serve]\nport = 9\nno-verify = true\n")
    place = str(tmp_path / "made.pt2")
    assert options_of(tmp_path, "compile") == {"name": "all", "output": place}
    assert options_of(tmp_path, "export") == {"name": "all"}  # `output` is the bundle
    assert options_of(tmp_path, "serve") == {"port": "9", "no_verify": True}


def test_the_file_is_looked_for_upwards_to_the_top_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "repository" / "models" / "small"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    (tmp_path / "repository" / "pyproject.toml").write_text("[tool.mctl]\nmodel = 'models/small/model.py:net'\n")
    (tmp_path / "repository" / "models" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    found = config.load(Path(), "build", KNOWN)
    assert found is not None and found.path.resolve() == tmp_path / "repository" / "pyproject.toml"
    file, _, name = str(found.options["model"]).partition(":")
    assert (Path(file).resolve(), name) == (inner / "model.py", "net")
    (inner.parent / ".git").mkdir()
    assert config.load(Path(), "build", KNOWN) is None


def test_mctl_toml_wins_and_other_tables_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.mctl]\nname = "pyproject"\n')
    assert options_of(tmp_path) == {"name": "pyproject"}
    (tmp_path / "mctl.toml").write_text('name = "own"')
    assert options_of(tmp_path) == {"name": "own"}
    (tmp_path / "mctl.toml").unlink()
    (tmp_path / "pyproject.toml").write_text("[tool]\nmctl = 3\n")
    with pytest.raises(UsageError, match="is no table"):
        options_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernels = 'own'", "`mctl.toml`: `kernels`: "),
        ("standalone = 'maybe'", "`mctl.toml`: `standalone`: "),
        ("seed = 'x'", "`mctl.toml`: `seed`: "),
    ],
)
def test_a_value_that_an_option_does_not_take_names_the_file(
    tmp_path: Path, text: str, message: str, run_mctl: Run
) -> None:
    (tmp_path / "mctl.toml").write_text(text)
    done = run_mctl("build", "model.py", cwd=tmp_path)
    assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stderr


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path: Path, run_mctl: Run) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "mctl.toml").write_text('dim = "batch=1:8"\njunit = "out/junit.xml"\n')
    done = run_mctl("build", "model.py", "-o", "made.pt2", cwd=tmp_path)
    assert done.returncode == 2
    assert "options from `mctl.toml`: dim, junit" in done.stderr
    assert "error: cannot write `out/junit.xml`: there is no folder" in done.stderr and "`--junit`" in done.stderr
    assert not (tmp_path / "made.pt2").exists()

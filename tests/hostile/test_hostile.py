"""Every bad bundle is refused at its stage, with a message that names the fault."""

import subprocess
import sys
from pathlib import Path

import pytest

from mctl.bundle_format import contents
from mctl.bundle_format.archive import Archive, open_bundle
from mctl.bundle_format.errors import BundleError

from .bad_bundles import Bad, bad_bundles

BUNDLES = list(bad_bundles())


def refused_at(path: Path) -> tuple[str, str]:
    """The stage that refuses the file, and the message."""
    stage = "open"
    try:
        with Archive.open(path) as archive:
            stage = "manifest"
            _ = archive.manifest
            stage = "digest"
            archive.verify()
            stage = "contents"
            contents.check(archive)
            return "good", ""
    except BundleError as error:
        return stage, error.message


@pytest.mark.parametrize("bad", BUNDLES, ids=[bad.name for bad in BUNDLES])
def test_refused(bad: Bad, tmp_path: Path) -> None:
    path = tmp_path / "bundle.pt2"
    path.write_bytes(bad.data)
    stage, message = refused_at(path)
    assert stage == {"crc": "digest"}.get(bad.stage, bad.stage), message
    assert bad.error in message.replace(str(path), "")
    assert len(message) < 2000
    assert message.count("is damaged") <= 1
    assert message.replace("\n", "").isprintable()  # no escape sequence reaches a terminal
    if bad.stage in ("open", "manifest"):
        with pytest.raises(BundleError):
            open_bundle(path)


def test_names_are_unique() -> None:
    names = [bad.name for bad in BUNDLES]
    assert len(set(names)) == len(names)


def test_the_builder_runs_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hostile.bad_bundles", tmp_path]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert str(len(BUNDLES)) in done.stdout
    assert (tmp_path / "index.json").exists()

"""What was compiled before is found again, or compiled again."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from mctl.aoti.cache import Cache, default_folder, key_of
from mctl.aoti.protocol import LIBRARY, WEIGHTS, Recipe


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    """Two files that were compiled."""
    (tmp_path / "made").mkdir()
    files = [tmp_path / "made" / name for name in (LIBRARY, WEIGHTS)]
    for file in files:
        file.write_text(f"as {file.name} was")
    return files


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def test_what_is_kept_is_found_again(tmp_path: Path, made: list[Path], into: Path) -> None:
    cache, key = Cache(tmp_path / "cache"), key_of("program", Recipe(""))
    assert cache.get(key, into) is None
    cache.put(key, made, b'{"seconds":7}')
    assert cache.get(key, into) == b'{"seconds":7}'
    assert (into / LIBRARY).read_text() == f"as {LIBRARY} was" and (into / WEIGHTS).read_text() == f"as {WEIGHTS} was"
    assert cache.get(key_of("program", Recipe("", packed=True)), into) is None


@pytest.mark.parametrize("name", [LIBRARY, WEIGHTS, "entry.json"])
def test_what_is_not_as_it_was_kept_is_made_again(tmp_path: Path, made: list[Path], into: Path, name: str) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put("key", made)
    (tmp_path / "cache/key" / name).write_text("changed")
    assert cache.get("key", into) is None
    cache.put("key", made)
    assert cache.get("key", into) == b"null"


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, made: list[Path]) -> None:
    (tmp_path / "file").write_text("")
    for cache in (Cache(tmp_path / "file" / "cache"), Cache(None)):
        cache.put("key", made)
        assert cache.get("key", tmp_path) is None


@pytest.mark.parametrize("name", ["../stolen", "../../stolen", "/stolen", "sub/stolen", "..", ".", ""])
def test_an_entry_names_files_of_its_own_alone(tmp_path: Path, made: list[Path], into: Path, name: str) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put("key", made)
    kept = tmp_path / "cache/key"
    (kept / "sub").mkdir()
    for place in (tmp_path / "stolen", tmp_path / "cache/stolen", kept / "sub/stolen"):
        place.write_text("a secret")
    digests = {name if name[:1] != "/" else str(tmp_path / "stolen"): hashlib.sha256(b"a secret").hexdigest()}
    (kept / "entry.json").write_text(json.dumps({"digests": digests, "note": None}))
    (into / "sub").mkdir()
    assert cache.get("key", into) is None
    assert not (tmp_path / "into/stolen").exists() and sorted(path.name for path in into.iterdir()) == ["sub"]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_what_others_could_have_written_is_not_used(tmp_path: Path, made: list[Path], into: Path, mode: int) -> None:
    cache, folder = Cache(tmp_path / "cache"), tmp_path / "cache"
    cache.put("key", made)
    folder.chmod(mode)
    assert cache.get("key", into) is None and not list(into.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
    cache.put("key", made)
    assert cache.get("key", into) == b"null"


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path, made: list[Path]) -> None:
    before = os.umask(0)
    try:
        Cache(tmp_path / "cache").put("key", made)
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_folder_of_another_user_is_not_used(
    tmp_path: Path, made: list[Path], into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    cache.put("key", made)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert cache.get("key", into) is None and not list(into.iterdir())
    cache.put("other", made)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert default_folder() is None

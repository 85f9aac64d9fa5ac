"""What was compiled before is found again, or compiled again."""

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


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert default_folder() is None

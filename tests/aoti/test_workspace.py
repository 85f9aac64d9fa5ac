import subprocess
import tempfile
from pathlib import Path

import pytest

from mctl.aoti.workspace import Workspace, find_compiler, require_space, wrap_compiler
from mctl.bundle_format.errors import CompileError


def test_nothing_is_left(tmp_path: Path) -> None:
    with Workspace(tmp_path) as work:
        assert work.path.parent == tmp_path
        folder = work.subfolder("one")
        (folder / "tmp" / "file").write_text("x")
        (folder / "kept").write_text("x")
        work.clear(folder)
        assert [path.name for path in folder.iterdir()] == ["kept"]
        assert sorted(path.name for path in work.subfolder("one").iterdir()) == ["cache", "tmp"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_torch_would_have_to_quote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tmp_path / "plain", tmp_path / "blän k"
    for place in places:
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places[0]))
    with Workspace(places[1]) as work:
        assert work.path.parent.parent == places[0]
        assert work.path.resolve().parent == places[1]
        folder = work.subfolder("one")
        assert folder.is_relative_to(work.path) and (folder.resolve() / "cache").is_dir()
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_no_place_to_work_in(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no such file or directory") as caught:
        Workspace(tmp_path / "missing")
    assert "--work-dir" in (caught.value.hint or "")


def test_too_little_space(tmp_path: Path) -> None:
    require_space(tmp_path, 1 << 10, "x")
    with Workspace(tmp_path) as work, pytest.raises(CompileError, match=r"MiB left, about \d+ MiB are needed"):
        work.require_space(1 << 60)


def test_the_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() == ["g++"]
    monkeypatch.setenv("CXX", "env g++ -pipe")
    assert find_compiler() == ["env", "g++", "-pipe"]
    monkeypatch.setenv("CXX", "nothing-here -pipe")
    with pytest.raises(CompileError, match="`nothing-here` of the variable CXX is not there"):
        find_compiler()


def test_the_wrapped_compiler_hides_folders(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("const char* place() { return __FILE__; }\n")
    wrapper = wrap_compiler(["env", "g++"], tmp_path, {str(tmp_path): "build"})
    assert wrapper.name == "g++"
    subprocess.run([wrapper, "-g", "-shared", "-fPIC", source, "-o", tmp_path / "a.so"], check=True)
    content = (tmp_path / "a.so").read_bytes()
    assert b"build/a.cpp" in content
    assert str(tmp_path).encode() not in content
    assert b".debug_info" not in content


def test_a_folder_where_nothing_may_run(tmp_path: Path) -> None:
    """A stand-in for a file system mounted with noexec: the compiler's own answer is a failure."""
    with pytest.raises(CompileError, match="cannot run the C\\+\\+ compiler"):
        wrap_compiler(["false"], tmp_path, {})

"""Torch's private parts: each touch says what it is; what does not apply with another torch is noted, or an error."""

import inspect
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config
from torch._inductor.codecache import AotCodeCompiler

from mctl.aoti import inductor, torch_private
from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import CompileError

Run = Callable[..., subprocess.CompletedProcess[str]]
TORCH = f"torch {torch.__version__}"


def test_every_touch_says_what_why_and_otherwise() -> None:
    """A function that names a private part of torch, or a class about one, has the three lines."""
    for name, thing in vars(torch_private).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != torch_private.__name__:
            continue
        if re.search(r"torch\._[a-z]|torch\.cpu|_graph", inspect.getsource(thing).replace(thing.__doc__ or "", "")):
            for word in ("Touches: ", "Why: ", "Otherwise: "):
                assert word in (thing.__doc__ or ""), f"{name} lacks `{word}`"


def test_a_call_that_is_not_looked_at_is_noted() -> None:
    notes: list[str] = []
    known = "    aoti_torch_cpu_scatter_out(a, b);\n    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(a, b));\n"
    code = torch_private.with_checks(known, notes.append)
    assert code.splitlines()[0] == "    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_scatter_out(a, b));"
    assert not notes
    torch_private.with_checks(known.replace("    aoti", "    auto error = aoti"), notes.append)
    assert notes == [f"an error of `scatter_out` is not seen: {TORCH} writes the call anew"]


def test_steps_of_whole_numbers_are_wide() -> None:
    code = "auto a = at::vec::VectorizedN<int64_t,2>::arange(tmp2, 1000000000);"
    assert torch_private.with_wide_steps(code) == code.replace("1000000000", "1000000000L")
    code = "auto a = at::vec::Vectorized<int64_t>::arange(tmp2, -3);"
    assert torch_private.with_wide_steps(code) == code.replace("-3", "-3L")
    code = "auto a = at::vec::Vectorized<float>::arange(tmp2, 3);"
    assert torch_private.with_wide_steps(code) == code


def test_a_compiler_that_takes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AotCodeCompiler, "compile", lambda graph, codes: None)
    message = rf"{re.escape(TORCH)} compiles in a way that this mctl does not know"
    with pytest.raises(CompileError, match=message), torch_private.watching(lambda *_: None, pytest.fail):
        pass


def test_a_graph_of_another_kind_is_an_error() -> None:
    graph = torch_private.Lowered(SimpleNamespace(constants={}))
    for look in (graph.constants, graph.library_names, graph.written):
        with pytest.raises(CompileError, match=rf"{re.escape(TORCH)} has no `\w+` where this mctl looks for it"):
            look()


def test_callers_that_torch_does_not_say_are_noted() -> None:
    notes: list[str] = []
    assert torch_private.Lowered(SimpleNamespace()).callers(notes.append) == {}
    assert len(notes) == 1
    assert notes[0].startswith(f"{TORCH} does not say which modules call operators")


def test_options_that_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = inductor.settings((), None, "g++", stateful=False)
    assert inductor.known_settings(chosen, pytest.fail) == chosen
    known, notes = config.get_config_copy(), list[str]()
    monkeypatch.setattr(torch_private, "options", lambda: known)
    del known["cpp.vec_isa_ok"]
    assert inductor.known_settings(chosen, notes.append).keys() == chosen.keys() - {"cpp.vec_isa_ok"}
    assert notes == [f"{TORCH} has no option `cpp.vec_isa_ok` of inductor, which mctl sets to True"]
    del known["cpp_wrapper"], known["aot_inductor.custom_ops_to_c_shims"]
    with pytest.raises(CompileError, match="no option `cpp_wrapper` of inductor, without which there is no bundle"):
        inductor.known_settings(chosen, notes.append)
    with pytest.raises(CompileError, match="cannot call mctl's kernels") as caught:
        torch_private.c_functions({})
    assert "--kernels torch" in (caught.value.hint or "")


def test_the_bundle_keeps_the_note(tmp_path: Path, mlp_program: Path, run_mctl: Run) -> None:
    """With a torch that has another name for one of the questions about the CPU."""
    (tmp_path / "sitecustomize.py").write_text("import torch.cpu\ndel torch.cpu._is_amx_fp16_supported\n")
    command = ("compile", mlp_program, "-o", tmp_path / "bundle.pt2", "--no-parity", "--kernels", "torch")
    done = run_mctl(*command, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    with open_bundle(tmp_path / "bundle.pt2") as archive:
        assert any("has no `torch.cpu._is_amx_fp16_supported`" in note for note in archive.manifest.notes)

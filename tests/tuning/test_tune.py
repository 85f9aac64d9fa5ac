"""A bundle that is tuned for real: compiled, measured, judged and served."""

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from mctl.aoti import plan
from mctl.aoti.compiler import Built, CompileOptions, Precision, Staged
from mctl.aoti.protocol import Recipe
from mctl.bundle_format import manifest as manifests
from mctl.bundle_format import summary, tensors
from mctl.bundle_format.archive import open_bundle, rewrite
from mctl.bundle_format.errors import CompileError, UsageError
from mctl.bundle_format.manifest import Tolerance
from mctl.parity.report import to_text
from mctl.runner import bench as timing
from mctl.runner.session import load
from mctl.tuning import gate, selection
from mctl.tuning import tune as tuning
from mctl.tuning.gate import FailedError, Made, compile_checked
from mctl.tuning.selection import Budget, Duel, Selection
from mctl.tuning.tune import TuneOptions, _most_points, reselect

from ..parity import fakes
from ..serving.server import Server, infer_binary, outputs_of

STATIC = Recipe("packed-batch1", {"batch": 1}, packed=True)
PLAIN = Recipe("plain")
BF16 = Recipe("bf16", packed=True, bf16=True)
BF16_STATIC = Recipe("bf16-batch1", {"batch": 1}, packed=True, bf16=True)
Tune = Callable[..., Made]


def quiet(text: str) -> None:
    pass


def winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate wins: what is measured does not decide what is tested."""
    monkeypatch.setattr(Duel, "won", lambda self, noise: True)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants come out of the compiler with other weights than the model's."""

    def spoiled(self: Staged, recipe: Recipe, progress: Callable[[str], None]) -> Built:
        built = original(self, recipe, progress)
        data = bytearray(built.weights.read_bytes())
        entry = max(tensors.read_header(data).values(), key=lambda entry: entry.end - entry.begin)
        values = np.frombuffer(data, np.float32, (entry.end - entry.begin) // 4, entry.begin)
        values *= 1.5
        built.weights.write_bytes(data)
        return built

    original = Staged.build
    monkeypatch.setattr(Staged, "build", spoiled)


@pytest.fixture(scope="module")
def tune(mlp_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Tune:
    """Tunes the MLP with two buckets and these candidates, each of which is compiled once for all tests."""
    folder = tmp_path_factory.mktemp("tuned")

    def made(
        name: str,
        *recipes: Recipe,
        options: TuneOptions | None = None,
        parity: bool = True,
        precision: Precision = "f32",
        tolerance: Tolerance | None = None,
    ) -> Made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "candidates", lambda *_, **__: list(recipes))
            patch.setattr(selection, "WINDOW", 0.002)
            patch.setattr(timing, "MOST_ROUNDS", timing.LEAST_ROUNDS)
            return compile_checked(
                mlp_program,
                folder / f"{name}.pt2",
                CompileOptions(buckets={"batch": (1,)}, tune="fast", precision=precision, work_dir=folder),
                tuning=options or TuneOptions("fast", threads=(1,)),
                parity=parity,
                tolerance={"output": tolerance} if tolerance else None,
                progress=quiet,
            )

    return made


@pytest.fixture(scope="module")
def tuned(tune: Tune) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        winner(patch)
        return tune("tuned", STATIC)


def eager() -> torch.nn.Module:
    torch.manual_seed(0)  # the default of `mctl export --seed`
    return runpy.run_path(str(Path(__file__).parents[2] / "samples/mlp.py"))["model"]().eval()


def test_the_manifest_says_what_was_measured_and_chosen(tuned: Made) -> None:
    found = tuned.manifest
    assert [v.name for v in found.variants] == ["dynamic", "packed-batch1"] and found.parity == "pass"
    assert found.variants[1].covers == {"batch": (1, 1)}
    assert found.tuning is not None
    assert [(c.dims["batch"], c.threads, c.variant) for c in found.tuning.choices] == [
        *((1, 1, "packed-batch1"), (64, 1, "dynamic"))
    ]
    assert [(t.dims["batch"], t.variant) for t in found.tuning.timings] == [
        *((1, "dynamic"), (1, "packed-batch1"), (64, "dynamic"))
    ]
    assert all(timing.median_ns > 1000 for timing in found.tuning.timings)
    assert [point.dims for point in found.curve] == [{"batch": 1}, {"batch": 64}]


def test_what_tuning_took_and_bought(tuned: Made, tmp_path: Path) -> None:
    found = tuned.manifest.tuning
    assert found is not None and 0 < tuned.manifest.variants[1].tuning_ms <= found.total_ms
    at = {"batch": 1}
    taken = [
        manifests.Timing(dims=at, threads=1, variant=name, median_ns=ns)
        for name, ns in (("dynamic", 6200), ("packed-batch1", 5000))
    ]
    first, second = tuned.manifest.variants
    second = msgspec.structs.replace(second, tuning_ms=38_400)
    other = msgspec.structs.replace(found, total_ms=150_200, timings=tuple(taken))
    path = tmp_path / "bundle.pt2"
    with open_bundle(tuned.path) as archive:
        changed = msgspec.structs.replace(archive.manifest, tuning=other, variants=(first, second))
        rewrite(archive, path, changed, {})
    told = summary.summarize(path)
    code = summary.human_bytes(told.variants[1].bytes)
    lines = ["tuning took 150 s", f"packed-batch1: batch=1 is 1.24 times as fast, for 38 s and {code}"]
    assert summary.tuning_costs(told) == lines
    assert all(line in "\n".join(summary.lines(told)) for line in lines)


def test_what_was_compiled_before_counts_as_what_it_took_then() -> None:
    staged = fakes.staged(fakes.subject(lambda x: x).manifest, (), {})
    times = iter([100.0, 140.0])
    budget = Budget(180, lambda: next(times))
    contest = tuning._Contest(staged, None, None, budget, lambda _: "", print)  # type: ignore[arg-type]
    for name, seconds in (("cached", {}), ("fresh", {"compile C++": 30.0})):
        built = SimpleNamespace(name=name, seconds=seconds, done=SimpleNamespace(seconds=30.0))
        contest.count(built, 20)  # type: ignore[arg-type]
    assert contest.seconds == {"cached": 50, "fresh": 20}
    assert contest.total_ms == 70_000


def test_variants_share_their_weights(tuned: Made, mlp_bundle: Path) -> None:
    """Packed once, they are the same bytes for both: nothing was added."""
    one, two = (summary.summarize(path) for path in (mlp_bundle, tuned.path))
    assert two.sizes["weights"] < 1.01 * one.sizes["weights"]
    assert [variant.own_bytes for variant in two.variants] == [0, 0]
    text = "\n".join(summary.lines(two))
    assert "batch=1   1        packed-batch1" in text and "batch=64  1        dynamic" in text


def test_answers_are_eagers_at_every_size(tuned: Made) -> None:
    model = eager()
    with load(tuned.path, threads=1) as session, torch.no_grad():
        for rows in range(1, 65):
            x = torch.randn(rows, 128)
            for pad in (False, True):
                torch.testing.assert_close(session.call({"x": x}, pad=pad)["output"], model(x))


def test_the_server_runs_the_chosen_variants(tuned: Made) -> None:
    model = eager()
    with Server(tuned.path, "--threads=1") as server, torch.no_grad():
        for rows, variant in ((1, "packed-batch1"), (2, "dynamic"), (64, "dynamic")):
            x = torch.randn(rows, 128)
            answer = server.request("/v2/models/mlp/infer", *infer_binary(x=x.numpy()))
            np.testing.assert_allclose(outputs_of(answer)["output"], model(x).numpy(), rtol=1e-4, atol=1e-5)
            assert answer.headers["x-mctl-variant"] == variant


def test_a_variant_that_is_wrong_is_dropped(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    winner(monkeypatch)
    made = tune("wrong", STATIC)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic"]
    assert "variant `packed-batch1` was dropped: parity found differs in `batch=1`" in made.manifest.notes
    assert made.report is not None and made.report.ok
    assert made.manifest.tuning is not None
    assert {choice.variant for choice in made.manifest.tuning.choices} == {"dynamic"}


def test_bfloat16_within_the_users_tolerance(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    winner(monkeypatch)
    allowed = Tolerance(rtol=1e-3, atol=1e-3)
    judged = []
    original = gate._Gate.fault_of
    monkeypatch.setattr(gate._Gate, "fault_of", lambda *given: judged.append(given[1][0].name) or original(*given))
    made = tune("bf16", BF16, tolerance=allowed)
    assert judged == ["bf16"]  # once
    assert [(variant.name, variant.bf16) for variant in made.manifest.variants] == [("dynamic", False), ("bf16", True)]
    assert made.manifest.tuning is not None
    assert {choice.variant for choice in made.manifest.tuning.choices} == {"bf16"}
    text = "\n".join(summary.lines(summary.summarize(made.path)))
    assert text.count("products in bfloat16") == 1
    with load(made.path, threads=1) as session, torch.no_grad():
        x = torch.randn(64, 128)
        got, wanted = session.call({"x": x})["output"], eager()(x)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        assert (got - wanted).abs().max() > 1e-5  # float32 is closer


def test_bfloat16_beyond_the_tolerance_is_not_measured(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would win at first, and take the places of variants that are right."""
    winner(monkeypatch)
    made = tune("exact", BF16, STATIC, BF16_STATIC)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic", "packed-batch1"]
    (note,) = made.manifest.notes
    assert note.startswith("no more variants in bfloat16: parity found differs in") and "--tolerance" in note


def test_a_bundle_in_bfloat16_beyond_the_tolerance_is_refused(tune: Tune) -> None:
    with pytest.raises(FailedError, match="the bundle was not written: differs") as caught:
        tune("refused", precision="bf16")
    wanted = "`--tolerance OUTPUT=RTOL,ATOL`, or compile with `--precision f32`"
    assert wanted in (caught.value.hint or "")
    text = "\n".join(to_text(caught.value.report))
    assert wanted in text and "make it again" not in text


def test_a_variant_whose_weights_cost_more_than_allowed_is_dropped(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    winner(monkeypatch)
    made = tune("large", STATIC, options=TuneOptions("fast", threads=(1,), max_packed_mb=0), parity=False)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic"]
    dropped = "variant `packed-batch1` was dropped: its 262.1 kB bring"  # 256 x 256 floats
    assert any(note.startswith(dropped) for note in made.manifest.notes)


def test_without_time_nothing_is_tried(tune: Tune) -> None:
    made = tune("hasty", STATIC, PLAIN, options=TuneOptions("fast", seconds=0, threads=(1,)), parity=False)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic"]
    assert made.manifest.notes[-1] == "tuned within its budget: 2 of 2 candidates were not tried"


def test_ctrl_c_keeps_what_was_measured(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Staged, recipe: Recipe, progress: Callable[[str], None]) -> Built:
        if recipe is PLAIN:
            raise KeyboardInterrupt
        return original(self, recipe, progress)

    original = Staged.build
    monkeypatch.setattr(Staged, "build", interrupted)
    winner(monkeypatch)
    made = tune("stopped", STATIC, PLAIN, parity=False)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic", "packed-batch1"]
    assert made.manifest.notes[-1] == "tuning was stopped: what was measured until then counts"


def test_ctrl_c_at_the_very_beginning_leaves_the_bundle_untuned(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Duel:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "duel", interrupted)
    made = tune("untuned", STATIC, parity=False)
    assert [variant.name for variant in made.manifest.variants] == ["dynamic"]
    assert made.manifest.tuning is None
    assert made.manifest.notes[-1] == "tuning was stopped before anything was compared"


def test_a_candidate_that_cannot_be_compiled_is_left_out(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Staged, recipe: Recipe, progress: Callable[[str], None]) -> Built:
        if recipe is PLAIN:
            raise CompileError("torch cannot compile the program")
        return original(self, recipe, progress)

    original = Staged.build
    monkeypatch.setattr(Staged, "build", refused)
    made = tune("refused", PLAIN, parity=False)
    assert made.manifest.notes[-1] == "variant `plain` was left out: torch cannot compile the program"


def test_reselect_measures_anew_and_compiles_nothing(
    tuned: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bundle.pt2"
    with open_bundle(tuned.path) as archive:
        assert archive.manifest.tuning is not None
        elsewhere = manifests.Machine(cpu="another", cores=1)
        other = msgspec.structs.replace(archive.manifest.tuning, machine=elsewhere, choices=(), threads=7)
        rewrite(archive, path, msgspec.structs.replace(archive.manifest, tuning=other), {})
    monkeypatch.setattr(selection, "WINDOW", 0.002)
    winner(monkeypatch)
    reselect(path, (1,), quiet)
    with open_bundle(path) as archive:
        archive.verify()
        now = archive.manifest.tuning
        assert now is not None and now.machine == tuning.this_machine() and now.threads == 1
        assert [choice.variant for choice in now.choices] == ["packed-batch1", "dynamic"]
        assert archive.manifest.variants == tuned.manifest.variants


def test_one_variant_leaves_nothing_to_choose(mlp_bundle: Path, tmp_path: Path) -> None:
    path = shutil.copy(mlp_bundle, tmp_path / "b.pt2")
    with pytest.raises(UsageError, match="there is nothing to choose"):
        reselect(path, (), quiet)


def test_the_selection_is_of_the_options_threads() -> None:
    assert TuneOptions("fast").measured_threads[0] == 1
    assert TuneOptions("fast", threads=(4, 2)).measured_threads == (2, 4)
    assert (TuneOptions("fast").budget, TuneOptions("full").budget, TuneOptions("full", 5.0).budget) == (180, 3600, 5)
    assert Selection([], [1], "dynamic").begun


@pytest.mark.parametrize(
    ("budget", "threads", "most"), [(180, 2, 15), (60, 2, 5), (60, 1, 10), (5, 2, 1), (3600, 2, 16)]
)
def test_a_short_budget_has_few_points(budget: float, threads: int, most: int) -> None:
    """At a second for each of them and each number of threads all take a sixth of it; one at least, 16 at most."""
    assert _most_points(budget, threads) == most

"""`mctl bench`: sizes, peers, warnings, and one real run."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.contract import Dim
from mctl.bundle_format.errors import UsageError
from mctl.export.onnx import to_onnx
from mctl.export.program import load_program
from mctl.runner.bench import Measured, Ratio
from mctl.runner.stopwatch import Ask, Stopwatch
from mctl.tuning import bench, peers, plot
from mctl.tuning.bench import BenchReport, Wanted

SAMPLES = Path(__file__).parents[2] / "samples"


def test_dims_as_they_are_written() -> None:
    assert bench.parse_dim("batch=1:64") == ("batch", Wanted(ends=(1, 64)))
    assert bench.parse_dim("batch=1,8") == ("batch", Wanted((1, 8)))
    for text in ("batch", "batch=", "batch=a", "=1", "batch=1:2:3"):
        with pytest.raises(UsageError, match="is not understood"):
            bench.parse_dim(text)


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [
        (None, [1, 2, 4, 8, 16, 32, 64]),
        (Wanted(ends=(3, 20)), [3, 4, 8, 16, 20]),
        (Wanted((9, 2, 9)), [2, 9]),
        (Wanted((65,)), "`batch` cannot be 65, allowed 1..64"),
        (Wanted(ends=(8, 2)), "`batch=8:2` is no range"),
    ],
)
def test_sizes_of_the_batch(mlp_bundle: Path, wanted: Wanted | None, sizes: list[int] | str) -> None:
    with open_bundle(mlp_bundle) as archive:
        manifest = archive.manifest
    dim = manifest.contract.dims[0]
    if isinstance(sizes, str):
        with pytest.raises(UsageError) as raised:
            bench._sizes(dim, wanted, manifest)
        assert raised.value.message == sizes
    else:
        assert bench._sizes(dim, wanted, manifest) == sizes


def test_another_dim_is_measured_at_a_size_in_its_middle(mlp_bundle: Path) -> None:
    with open_bundle(mlp_bundle) as archive:
        manifest = msgspec.structs.replace(archive.manifest, buckets={"seq": (16, 32, 512)})
    assert bench._sizes(Dim(name="seq", min=1, max=512), None, manifest) == [32]  # above sqrt(512) = 22.6
    assert bench._sizes(Dim(name="n", min=3, max=300, multiple=3), None, manifest) == [48]  # 3 * 2^k above 30


def report(*found: tuple[int, int, float, bool]) -> BenchReport:
    """Of (threads, rows, us, whether it is stable)."""
    measured = [
        Measured("mctl", threads, {"batch": rows}, rows, us, us, us, 9, 0.0 if stable else 1.0, None)
        for threads, rows, us, stable in found
    ]
    return BenchReport("m 1", "", "batch", tuple(measured), {}, {}, ())


def test_warnings() -> None:
    buckets = (1, 2, 4, 8, 16, 32, 64)

    def told(*found: tuple[int, int, float, bool]) -> list[str]:
        threads = dict.fromkeys(sorted({threads for threads, *_ in found}), ())
        return list(bench._warnings(report(*found), buckets, threads, 2))

    assert told((1, 1, 10.0, True), (1, 2, 12.0, True), (2, 1, 9.0, True), (2, 2, 8.0, True)) == []
    assert told((4, 1, 10.0, True)) == ["threads oversubscribed: 4 threads on 2 cores"]
    assert told((1, 1, 10.0, True), (2, 1, 9.9, True)) == ["the model is too small to fill 2 threads"]
    assert told((1, 32, 32.0, True), (1, 64, 64.0, True)) == ["padding costs 94% at batch 33 with 1 thread"]
    loose = report((1, 32, 32.0, True), (1, 64, 64.0, True))
    assert list(bench._warnings(loose, buckets, {1: (64,)}, 2)) == [], "the bundle says that these are not padded"
    assert told((1, 8, 8.0, True), (1, 64, 64.0, True)) == [], "9 rows are padded to 16, which were not measured"
    assert told((1, 1, 10.0, False)) == ["1 of 1 numbers are unstable (marked ~): is the machine busy?"]


def test_a_run_with_peers(mlp_bundle: Path, mlp_program: Path, tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    program = load_program(mlp_program)
    twin = tmp_path / "program.onnx"
    twin.write_bytes(to_onnx(program.exported, program.manifest.contract, program.manifest.source))
    options = ["--dim", "batch=1,8", "--against", "eager,onnxruntime", "--onnx", str(twin)]
    done = run_mctl("bench", mlp_bundle, *options, "--model", SAMPLES / "mlp.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["schema"] == "mctl.bench/1" and not made["left_out"]
    assert [(m["name"], m["dims"]) for m in made["measured"]] == [
        (name, {"batch": rows}) for rows in (1, 8) for name in ("mctl", "eager", "onnxruntime")
    ]
    for found in made["measured"]:
        assert 1 < found["median_us"] <= found["p90_us"] <= found["p99_us"] < 1e6
    assert set(made["curves"]) == {"1"}


def test_the_peer_that_torch_compiles_is_the_model_at_every_size(mlp_bundle: Path) -> None:
    model = peers._BINDERS["aoti"](peers.Peer("aoti", str(mlp_bundle), 1, model=str(SAMPLES / "mlp.py")))
    eager = peers._BINDERS["eager"](peers.Peer("eager", str(mlp_bundle), 1, model=str(SAMPLES / "mlp.py")))
    for rows in (1, 5, 64):
        inputs = {"x": torch.randn(rows, 128)}
        with torch.no_grad():
            torch.testing.assert_close(model(inputs)(), {"output": eager(inputs)()})


def test_peers_that_cannot_be_had_are_named(mlp_bundle: Path, tmp_path: Path, run_mctl) -> None:  # type: ignore[no-untyped-def]
    peers = "eager,onnxruntime,eager-cuda"
    mlp_bundle = shutil.copy(mlp_bundle, tmp_path / "mlp.pt2")  # no ONNX model lies beside it
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run_mctl("bench", mlp_bundle, "--dim", "batch=1", "--against", peers, cwd=tmp_path, env=hidden)
    assert done.returncode == 0, done.stderr
    assert f"left out: eager-cuda: torch {torch.__version__} sees no CUDA device\n" in done.stdout
    assert "left out: eager: there is no `mlp.py` here (say where the model is with `--model MODEL.py`)" in done.stdout
    assert "left out: onnxruntime: there is no ONNX model of this export in" in done.stdout
    assert "mlp 1, 1 thread\n" in done.stdout
    wrong = run_mctl("bench", mlp_bundle, "--against", "tensorrt")
    assert wrong.returncode == 2 and "`--against tensorrt` is not known" in wrong.stderr
    wrong = run_mctl("bench", mlp_bundle, "--threads", "none")
    assert wrong.returncode == 2 and "`--threads none` is not understood" in wrong.stderr
    wrong = run_mctl("bench", mlp_bundle, "--dim", "rows=1")
    assert wrong.returncode == 2 and "there is no dim `rows`" in wrong.stderr


def test_the_table_shows_what_is_slower() -> None:
    from mctl.cli.bench import _advice, _ratio, _table

    base = report((1, 8, 1234.0, False))
    peer = Measured("eager", 1, {"batch": 8}, 8, 2468.0, 3000.0, 4000.0, 9, 0.0, Ratio(2.0, 1.9, 2.1))
    lines = _table(BenchReport("m 1", "", "batch", (*base.measured, peer), {}, {}, ()), 1)
    assert lines[3].split() == [
        "8",
        "~1.23",
        "ms",
        "1.23",
        "ms",
        "1.23",
        "ms",
        "6,483",
        "2.47",
        "ms",
        "2.00",
        "(1.90..2.10)",
    ]
    narrow = _table(BenchReport("m 1", "", "batch", (*base.measured, peer), {}, {}, ()), 1, 40)
    assert max(map(len, narrow)) <= 40 and narrow.count("") == 4  # in three parts
    assert [line.split()[0] for line in narrow if line.startswith(("batch", "    8"))] == ["batch", "8"] * 3
    assert sorted(" ".join(narrow).split()) == sorted(" ".join([*lines, "batch 8 batch 8"]).split())
    assert _ratio(base.measured[0]) == ""
    assert _advice(base, 1, 3.0)[0].startswith("`--max-batch-size 8` meets 3 ms")
    assert _advice(base, 1, 2.0)[0].startswith("no batch meets 2 ms")


@pytest.mark.parametrize("name", ["eager-cuda", "compile-cuda"])
def test_a_model_on_a_device_gets_its_inputs_there_and_its_outputs_back(
    mlp_bundle: Path, tmp_path: Path, name: peers.Name
) -> None:
    """The way is the same for every device; here there is no GPU."""
    peer = peers.Peer(name, str(mlp_bundle), 1, model=str(SAMPLES / "mlp.py"), device="cpu")
    with open_bundle(mlp_bundle) as archive:
        point = bench.point_at(archive.manifest, {"batch": 8}, tmp_path / "8.safetensors", 0, {})
    command = (sys.executable, "-P", "-m", "mctl.tuning.peers", msgspec.json.encode(peer).decode())
    with Stopwatch(name, command, 1) as watch:
        assert len(watch.time(Ask(str(point.tensors), point.dims, "", 0.0))) == 1
    if name == "eager-cuda":
        there = peers._BINDERS[name](peer)
        here = peers._BINDERS["eager"](peers.Peer("eager", str(mlp_bundle), 1, model=str(SAMPLES / "mlp.py")))
        inputs = {"x": torch.randn(8, 128)}
        torch.testing.assert_close(there(inputs)(), here(inputs)())


def test_every_tensor_of_a_call_goes_and_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device that has no values, from which none can come back."""
    seen = []

    def model(x: torch.Tensor, *, more: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.extend((x.device.type, more[0].device.type))
        return {"y": torch.ones(3)}

    waited = []
    module = SimpleNamespace(synchronize=lambda: waited.append(len(seen)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    made = peers._there_and_back(model, (torch.ones(2),), {"more": [torch.ones(1)]}, "meta")
    assert seen == ["meta", "meta"] and waited == [2]
    assert made == {"y": pytest.approx(torch.ones(3))}
    with pytest.raises(NotImplementedError, match="meta"):
        peers._there_and_back(lambda x: {"y": [x]}, (torch.ones(2),), {}, "meta")


def test_where_the_gpu_is_the_better_place() -> None:
    from mctl.cli.bench import _advice

    def told(gpu: dict[int, float], target: float | None = None) -> str:
        base = report((1, 1, 10.0, True), (1, 8, 40.0, True), (1, 64, 300.0, True))
        found = [Measured("eager-cuda", 1, {"batch": n}, n, us, us, us, 9, 0.0, None) for n, us in gpu.items()]
        return "\n".join(_advice(replace(base, measured=(*base.measured, *found)), 1, target))

    made = told({1: 50.25, 8: 52.0, 64: 66.0}, 0.11)
    assert "eager-cuda: latency = 50 us + 0.25 us x rows, off by at most 0%" in made
    assert "eager-cuda gives more rows/s than mctl on the CPU from batch 64 on, and meets 0.11 ms up to batch 8" in made
    assert "`--max-batch-size 8` meets 0.11 ms" in made
    assert "on the CPU at no batch" in told({1: 50.0, 8: 51.0, 64: 300.0})
    assert "on the CPU at every batch, and meets 0.01 ms at no batch" in told({1: 9.0, 8: 39.0, 64: 60.0}, 0.01)
    assert "on the CPU from batch 64 on" in told({1: 9.0, 8: 41.0, 64: 60.0}), "at one batch it happens to be faster"


def test_the_curve_is_kept_and_compared(mlp_bundle: Path, writable: Callable[[Path], Path]) -> None:
    path = writable(mlp_bundle)
    with open_bundle(path) as archive:
        digest = archive.digest
    measured = replace(report((1, 8, 40.4, True), (1, 1, 12.6, True), (1, 2, 13.0, False)), digest=digest)
    with pytest.raises(UsageError, match="has none of these points"):
        bench.slower_than_curve(path, measured)
    assert bench.save_curve(path, measured) == 2
    with open_bundle(path) as archive:
        archive.verify()
        kept = archive.manifest.curve
    assert [(point.dims, point.threads, point.median_us) for point in kept] == [
        ({"batch": 1}, 1, 13),
        ({"batch": 8}, 1, 40),
    ]
    with pytest.raises(UsageError, match="is another file by now"):
        bench.save_curve(path, measured)
    assert bench.slower_than_curve(path, measured) == []
    assert bench.slower_than_curve(path, report((1, 8, 44.6, True))) == []  # 40.5 * 1.05 * 1.05 = 44.65
    (found,) = bench.slower_than_curve(path, report((1, 8, 44.7, True), (1, 64, 900.0, True)))
    assert (found.dims, found.was_us, found.is_us) == ({"batch": 8}, 40, 44.7)


def test_pictures(tmp_path: Path) -> None:
    made = report((1, 1, 10.0, True), (1, 8, 20.0, True), (2, 8, 40.0, True))
    assert plot.in_terminal(made) == [
        "mctl, 1 thread",
        "     1  ████████████▌ 100,000 rows/s",
        f"     8  {'█' * 50} 400,000 rows/s",
        "",
        "mctl, 2 threads",
        f"     8  {'█' * 25} 200,000 rows/s",
        "",
    ]
    plot.to_file(made, tmp_path / "curve.svg")
    assert "rows in a batch" in (tmp_path / "curve.svg").read_text()
    plot.to_file(made, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="is no picture"):
        plot.require(tmp_path / "curve.txt")


def test_lines_of_several_dims_are_told_apart() -> None:
    measured = tuple(
        Measured("mctl", 1, {"batch": rows, "seq": 8}, rows, 1.0, 1.0, 1.0, 9, 0.0, None) for rows in (16, 8)
    )
    found = plot.series(BenchReport("m 1", "", "batch", measured, {}, {}, ()))
    assert {name: [point.rows for point in points] for name, points in found.items()} == {
        "mctl, 1 thread, seq 8": [8, 16]
    }


def test_a_model_by_its_name_in_the_file(mlp_bundle: Path, tmp_path: Path) -> None:
    with open_bundle(mlp_bundle) as archive:
        manifest = archive.manifest
    (tmp_path / "m.py").touch()
    spec = f"{tmp_path}/m.py:Net"
    request = bench.BenchRequest(mlp_bundle, {}, (1,), model=spec)
    assert bench._peer("eager", request, manifest).model == spec
    with pytest.raises(UsageError, match=r"there is no `.*other\.py:Net` here"):
        bench._peer("eager", replace(request, model=f"{tmp_path}/other.py:Net"), manifest)

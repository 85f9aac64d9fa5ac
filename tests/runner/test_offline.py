"""`run_files`: rows of files streamed in batches; outputs that the safetensors library reads, whole or not at all."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.errors import ContractError, MctlError, ModelError, UsageError
from mctl.runner.offline import run_files
from mctl.runner.session import Session
from mctl.runner.sources import MadeSource, Spec, parse_size, parse_spec

CONTRACT = Contract(
    dims=(Dim(name="batch", min=2, max=8), Dim(name="seq", min=1, max=16)),
    inputs=(
        Input(name="x", dtype="float32", shape=("batch", "seq")),
        Input(name="ids", dtype="int32", shape=("batch",), range=(5, 9)),
        Input(name="scale", dtype="bfloat16", shape=()),
    ),
    outputs=(
        Output(name="scaled", dtype="float32", shape=("batch", "seq")),
        Output(name="pairs", dtype="int32", shape=("2*batch", 3)),
        Output(name="half", dtype="bfloat16", shape=("batch",)),
    ),
    batch_dim="batch",
)


class Model:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        x, ids, scale = tensors
        self.sizes.append(len(ids))
        assert bool(((ids >= 5) & (ids <= 9)).all())
        return [x * scale.float(), ids.repeat_interleave(2)[:, None].expand(-1, 3), ids.bfloat16()]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def session(model: Model, session_over: Callable[..., Session]) -> Session:
    return session_over(CONTRACT, model)


def specs(*texts: str) -> list[Spec]:
    return [parse_spec(text) for text in texts]


def refusal(call: Callable[[], object], kind: type[MctlError] = UsageError) -> MctlError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


@pytest.fixture
def files(tmp_path: Path) -> dict[str, np.ndarray]:
    """27 rows: three batches of 8, and 3 that are left."""
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((27, 5), np.float32), "ids": random.integers(5, 10, 27, np.int32)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    tensors = {"x": torch.from_numpy(arrays["x"]), "factor": torch.tensor(1.5).bfloat16()}
    save_file(tensors, tmp_path / "some.safetensors")
    return arrays


def expected(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {
        "scaled": torch.from_numpy(arrays["x"] * np.float32(1.5)),
        "pairs": torch.from_numpy(np.repeat(np.repeat(arrays["ids"], 2)[:, None], 3, axis=1)),
        "half": torch.from_numpy(arrays["ids"]).bfloat16(),
    }


def test_streamed_in_batches(session: Session, model: Model, files: dict[str, np.ndarray], tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = run_files(
        session,
        specs(f"x=@{tmp_path}/x.npy", f"ids=@{tmp_path}/ids.npy", f"scale=@{tmp_path}/some.safetensors:factor"),
        output=tmp_path / "out.safetensors",
        progress=lambda done, rows: steps.append((done, rows)),
    )
    assert model.sizes == [8, 8, 8, 3]
    assert steps == [(8, 27), (16, 27), (24, 27), (27, 27)]
    assert (report.rows, report.calls) == (27, 4)
    assert [(o.name, o.dtype, o.shape) for o in report.outputs] == [
        ("scaled", "float32", (27, 5)),
        ("pairs", "int32", (54, 3)),
        ("half", "bfloat16", (27,)),
    ]
    got = load_file(tmp_path / "out.safetensors")
    wanted = expected(files)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_rest_below_the_smallest_batch(
    session: Session, model: Model, files: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """25 rows leave 1, and the model takes no fewer than 2."""
    np.save(tmp_path / "ids.npy", files["ids"][:25])
    save_file({"x": torch.from_numpy(files["x"][:25])}, tmp_path / "some.safetensors")
    given = specs(f"x=@{tmp_path}/some.safetensors", f"ids=@{tmp_path}/ids.npy", "scale=ones")
    report = run_files(session, given, output=tmp_path / "out.safetensors")
    assert model.sizes == [8, 8, 8, 2]
    assert report.rows == 25
    got = load_file(tmp_path / "out.safetensors")
    assert torch.equal(got["scaled"], torch.from_numpy(files["x"][:25]))
    assert torch.equal(got["half"], torch.from_numpy(files["ids"][:25]).bfloat16())


def test_arrays_in_other_orders(session: Session, files: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(files["x"]))
    np.save(tmp_path / "ids.npy", files["ids"].astype(">i4"))
    given = specs(f"x=@{tmp_path}/x.npy", f"ids=@{tmp_path}/ids.npy", "scale=ones")
    run_files(session, given, output=tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["scaled"], torch.from_numpy(files["x"]))


def test_made_up_inputs(session: Session, model: Model) -> None:
    given = specs("x=random", "ids=random", "scale=ones")
    report = run_files(session, given, dims={"batch": 20, "seq": 3})
    assert model.sizes == [8, 8, 4]
    assert report.outputs[0].shape == (20, 3)


def test_random_numbers_are_the_seeds_and_in_range() -> None:
    ids = CONTRACT.inputs[1]
    draw = [MadeSource(ids, {"batch": 1000}, "random", seed).whole() for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    assert draw[0].dtype == torch.int32 and sorted(set(draw[0].tolist())) == [5, 6, 7, 8, 9]
    for dtype in ("bool", "uint16", "uint64", "int8", "float16", "float64"):
        declared = Input(name="v", dtype=dtype, shape=(4,))
        assert MadeSource(declared, {}, "random", 0).whole().dtype == getattr(torch, dtype)
    assert MadeSource(Input(name="v", dtype="uint8", shape=(4,)), {}, "ones", 0).whole().tolist() == [1] * 4


@pytest.mark.parametrize(
    ("given", "dims", "wanted", "hint"),
    [
        ([], {}, "missing input `x`: float32[batch,seq]", "`--input x=@FILE.npy`"),
        (["x=zeros", "ids=zeros", "scale=ones"], {"seq": 2}, "the dim `batch` has no size", "`--dim batch=SIZE`"),
        (["y=zeros"], {}, "there is no input `y`", "the model takes x, ids, scale"),
        (["x=zeros", "x=ones"], {}, "input `x` is given twice", None),
        (["x=zeros", "ids=zeros", "scale=ones"], {"n": 2}, "there is no dim `n`", "the model has batch, seq"),
    ],
)
def test_incomplete(session: Session, given: list[str], dims: dict[str, int], wanted: str, hint: str | None) -> None:
    error = refusal(lambda: run_files(session, specs(*given), dims=dims))
    assert error.message == wanted
    assert (hint is None and error.hint is None) or (hint or "") in (error.hint or "")


def test_files_that_do_not_fit(session: Session, files: dict[str, np.ndarray], tmp_path: Path, model: Model) -> None:
    out = tmp_path / "out.safetensors"
    np.save(tmp_path / "few.npy", files["ids"][:20])
    np.save(tmp_path / "wide.npy", files["x"].astype(np.float64))
    rest = (f"ids=@{tmp_path}/ids.npy", "scale=ones")

    def run(*texts: str, **options: object) -> Callable[[], object]:
        return lambda: run_files(session, specs(*texts), output=out, **options)  # type: ignore[arg-type]

    text = refusal(run(f"x=@{tmp_path}/x.npy", f"ids=@{tmp_path}/few.npy", "scale=ones"), ContractError).message
    assert text == "input 'ids': axis 0 is 20, but batch is 27 (input 'x', axis 0)"
    text = refusal(run(f"x=@{tmp_path}/wide.npy", *rest), ContractError).message
    assert text == "input 'x': dtype is float64, allowed float32"
    text = refusal(run(f"x=@{tmp_path}/x.npy", *rest, dims={"batch": 4})).message
    assert text == "`--dim batch=4`, but the files have 27"
    error = refusal(run(f"x=@{tmp_path}/some.safetensors:y", *rest))
    assert "has no tensor `y`" in error.message and "it has x, factor" in (error.hint or "")
    np.save(tmp_path / "ids.npy", np.where(np.arange(27) == 20, 4, files["ids"]).astype(np.int32))
    text = refusal(run(f"x=@{tmp_path}/x.npy", *rest), ContractError).message
    assert text == "input 'ids': value 4, allowed 5..9"
    assert model.sizes == [8, 8], "found when its batch came"
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_files_that_cannot_be_read(session: Session, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello, hello")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "empty.npy").touch()
    for name, wanted in (
        ("objects.npy", "holds pickled Python objects, which are never read"),
        ("text.npy", "is no array of numpy"),
        ("empty.npy", "is no array of numpy"),
        ("text.safetensors", "is no safetensors file"),
        ("empty.safetensors", "is no safetensors file"),
        ("none.npy", "no such file or directory"),
        ("data.csv", "as an input"),
    ):
        given = specs(f"x=@{tmp_path}/{name}", "ids=ones", "scale=ones")
        assert wanted in refusal(lambda given=given: run_files(session, given)).message, name


def test_an_output_that_is_not_what_was_declared(session_over: Callable[..., Session], tmp_path: Path) -> None:
    session = session_over(CONTRACT, lambda tensors: [tensors[0][:, :1], tensors[1], tensors[1]])
    given = specs("x=ones", "ids=random", "scale=ones")
    error = refusal(
        lambda: run_files(session, given, dims={"batch": 3, "seq": 2}, output=tmp_path / "o.safetensors"), ModelError
    )
    assert error.message == "output 'scaled' is float32[3, 1], declared float32[batch,seq]"
    assert not list(tmp_path.iterdir())


def test_models_without_a_batch_dim(session_over: Callable[..., Session], tmp_path: Path) -> None:
    contract = Contract(
        dims=(Dim(name="n", min=1, max=4),),
        inputs=(Input(name="x", dtype="float32", shape=("n",)),),
        outputs=(Output(name="y", dtype="float32", shape=()),),
    )
    session = session_over(contract, lambda tensors: [tensors[0].sum()])
    report = run_files(session, specs("x=ones"), dims={"n": 3}, output=tmp_path / "out.safetensors")
    assert (report.rows, report.calls) == (1, 1)
    assert load_file(tmp_path / "out.safetensors")["y"].item() == 3
    error = refusal(lambda: run_files(session, specs("x=ones"), dims={"n": 5}), ContractError)
    assert error.message == "input 'x': axis 0 is 5, allowed 1..4 (n)"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x=zeros", Spec("x", None, None, "zeros")),
        ("x=@a=b.npy", Spec("x", Path("a=b.npy"), None, None)),
        ("x=@my data.safetensors:a.b", Spec("x", Path("my data.safetensors"), "a.b", None)),
        ("x=@one.safetensors", Spec("x", Path("one.safetensors"), None, None)),
        ("batch.ids=random", Spec("batch.ids", None, None, "random")),
    ],
)
def test_forms_of_an_input(text: str, wanted: Spec) -> None:
    assert parse_spec(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "x=", "=zeros", "x=@", "x=5", "=@a.npy", "x=random:3"])
def test_no_form_of_an_input(text: str) -> None:
    assert refusal(lambda: parse_spec(text)).message == f"`--input {text}` cannot be read"


def test_forms_of_a_size() -> None:
    assert parse_size("batch=8") == ("batch", 8)
    for text in ("batch", "batch=", "batch=0", "batch=-1", "=3", "batch=1.5", "batch=²"):
        assert refusal(lambda text=text: parse_size(text)).message == f"`--dim {text}` cannot be read"

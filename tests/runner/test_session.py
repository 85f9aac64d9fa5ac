"""Session: what a compiled package takes silently is refused or right; numbers are eager's, memory is the caller's."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mctl.bundle_format import archive as archives
from mctl.bundle_format.contract import Contract, Dim, Input, Output, State
from mctl.bundle_format.errors import (
    BundleError,
    ClosedError,
    ContractError,
    HostError,
    MctlError,
    ModelError,
    UsageError,
    WrongKindError,
)
from mctl.bundle_format.layout import WEIGHTS
from mctl.export import golden
from mctl.runner import native
from mctl.runner.session import Session, load
from mctl.runner.stopwatch import Ask, runner_stopwatch

Eager = Callable[[str], nn.Module]


@pytest.fixture(scope="module")
def mlp(mlp_bundle: Path) -> Session:
    return load(mlp_bundle)


@pytest.fixture
def odd(odd_bundle: Path) -> Session:
    return load(odd_bundle)


@pytest.fixture(scope="module")
def odd_bundle(tmp_path_factory: pytest.TempPathFactory, mctl_ok: Callable[..., object]) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    source = Path(__file__).parent / "odd_model.py"
    mctl_ok("export", source, "--dim", "batch=1:8@x:0,ids:0", "-o", folder / "program.pt2")
    mctl_ok("compile", folder / "program.pt2", "-o", folder / "bundle.pt2")
    return folder / "bundle.pt2"


def message(call: Callable[[], object], kind: type[MctlError] = ContractError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.message


# --- what a compiled package takes silently ----------------------------------------------------------------------

REFUSED = {
    "no rows": (torch.zeros(0, 128), "input 'x': axis 0 is 0, allowed 1..64 (batch)"),
    "float64": (torch.zeros(2, 128, dtype=torch.float64), "input 'x': dtype is float64, allowed float32"),
    "float16": (torch.zeros(2, 128, dtype=torch.float16), "input 'x': dtype is float16, allowed float32"),
    "int64": (torch.zeros(2, 128, dtype=torch.int64), "input 'x': dtype is int64, allowed float32"),
    "complex": (torch.zeros(2, 128, dtype=torch.complex64), "input 'x': dtype is complex64, allowed float32"),
    "short last axis": (torch.zeros(2, 64), "input 'x': axis 1 is 64, allowed 128"),
    "rank 1": (torch.zeros(128), "input 'x': rank is 1, allowed 2 (float32[batch,128])"),
    "rank 3": (torch.zeros(1, 2, 128), "input 'x': rank is 3, allowed 2 (float32[batch,128])"),
    "another device": (torch.zeros(2, 128, device="meta"), "input 'x': device is meta, allowed cpu"),
    "sparse": (torch.zeros(2, 128).to_sparse(), "input 'x': layout is torch.sparse_coo, allowed torch.strided"),
    "a list": ([[0.0] * 128], "input 'x': is a Python list, allowed a torch tensor or a numpy array"),
    "a number": (1.0, "input 'x': is a Python float, allowed a torch tensor or a numpy array"),
    "None": (None, "input 'x': is a Python NoneType, allowed a torch tensor or a numpy array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(mlp: Session, case: str) -> None:
    value, wanted = REFUSED[case]
    for _ in range(2):  # nothing is remembered of a refusal
        assert message(lambda: mlp(x=value)) == wanted
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
        assert message(lambda: mlp(x=value.numpy())) == wanted


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 1000])
def test_numbers_are_eagers(mlp: Session, eager: Eager, rows: int) -> None:
    x = torch.randn(rows, 128)
    torch.testing.assert_close(mlp(x=x)["output"], eager("mlp")(x))


STRIDED = {
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(5, 128),
    "every second": lambda x: torch.stack([x, x], dim=-1).flatten(1)[:, ::2],
    "backwards": lambda x: x.flip(0)[torch.arange(4, -1, -1)],
    "lazily negated": lambda x: torch.imag(torch.complex(x, -x).conj()),
    "lazily negated and dense": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("case", STRIDED)
def test_strides_are_right_and_counted(mlp: Session, eager: Eager, case: str) -> None:
    x = STRIDED[case](torch.randn(5, 128))
    before = mlp.stats.made_contiguous
    got = mlp(x=x)["output"]
    torch.testing.assert_close(got, eager("mlp")(x))
    assert torch.equal(got, mlp(x=x.clone(memory_format=torch.contiguous_format))["output"])
    copied = not x.is_contiguous() or x.is_neg()
    assert mlp.stats.made_contiguous - before == copied


def mixed_inputs(rows: int = 3, seq: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(0, 100, (rows, seq))
    return {"batch.ids": ids, "batch.mask": torch.rand(rows, seq), "scale": torch.rand(rows)}


def test_constants_and_the_order_of_a_dict(mixed_bundle: Path, eager: Eager) -> None:
    session = load(mixed_bundle)
    inputs = mixed_inputs()
    nested = {"ids": inputs["batch.ids"], "mask": inputs["batch.mask"]}
    wanted = eager("mixed")(nested, scale=inputs["scale"], repeats=2)
    for given in (inputs, dict(reversed(inputs.items())), inputs | {"repeats": 2}):
        for got, want in zip(session.call(given).values(), wanted, strict=True):
            torch.testing.assert_close(got, want)
    assert message(lambda: session.call(inputs | {"repeats": 5})) == "constant 'repeats': is 5, compiled in as 2"
    assert message(lambda: session.call(inputs | {"repeats": 2.0})) == "constant 'repeats': is 2.0, compiled in as 2"
    assert message(lambda: session.call(inputs | {"repeats": torch.tensor(2)})).startswith("constant 'repeats': is a ")


def test_inputs_that_disagree(mixed_bundle: Path) -> None:
    session = load(mixed_bundle)
    text = message(lambda: session.call(mixed_inputs() | {"batch.mask": torch.rand(2, 5)}))
    assert text == "input 'batch.mask': axis 0 is 2, but batch is 3 (input 'batch.ids', axis 0)"


def test_names(mlp: Session) -> None:
    x = torch.zeros(1, 128)
    assert message(lambda: mlp()) == "missing input 'x': float32[batch,128]"
    assert message(lambda: mlp(x=x, y=x)) == "unknown input 'y': the model takes x"
    assert message(lambda: mlp(y=x)) == "unknown input 'y': the model takes x"


def test_values_out_of_range(odd: Session) -> None:
    inputs = {"x": torch.zeros(2, 3), "scale": torch.tensor(1.0)}
    for bad in (10, -1):
        ids = torch.tensor([0, bad])
        assert message(lambda ids=ids: odd(ids=ids, **inputs)) == f"input 'ids': value {bad}, allowed 0..9"
    odd(ids=torch.tensor([0, 9]), **inputs)
    assert message(lambda: odd(ids=torch.tensor([3, 10]), **inputs)) == "input 'ids': value 10, allowed 0..9"


# --- kinds of tensors --------------------------------------------------------------------------------------------


def test_a_range_over_dims_follows_the_sizes_of_each_call(session_over: Callable[..., Session]) -> None:
    session = session_over(
        Contract(
            dims=(Dim(name="nodes", min=2, max=50), Dim(name="edges", min=1, max=200)),
            inputs=(
                Input(name="edges", dtype="int64", shape=(2, "edges"), range=(0, "nodes-1")),
                Input(name="x", dtype="float32", shape=("nodes", 3)),
            ),
            outputs=(Output(name="y", dtype="float32", shape=("nodes", 3)),),
        ),
        lambda tensors: [tensors[1] * 2],
    )
    edges = torch.tensor([[0, 6], [6, 1]])
    for _ in range(2):  # the second time sizes are known
        session(edges=edges, x=torch.ones(7, 3))
        said = message(lambda: session(edges=edges, x=torch.ones(6, 3)))
        assert said == "input 'edges': value 6, allowed 0..5 (0..nodes-1)"
        said = message(lambda: session(edges=edges + 1, x=torch.ones(7, 3)))
        assert said == "input 'edges': value 7, allowed 0..6 (0..nodes-1)"


def test_the_answer_is_of_the_family_of_the_inputs(mixed_bundle: Path) -> None:
    session = load(mixed_bundle)
    inputs = mixed_inputs()
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    wanted = session.call(inputs)
    for name, array in session.call(arrays).items():
        assert isinstance(array, np.ndarray) and np.array_equal(array, wanted[name].numpy())
    assert all(isinstance(out, Tensor) for out in session.call(arrays | {"scale": inputs["scale"]}).values())


ARRAYS = {
    "read-only": lambda a: np.frombuffer(a.tobytes(), np.float32).reshape(a.shape),
    "other byte order": lambda a: a.astype(">f4"),
    "columns first": np.asfortranarray,
    "backwards": lambda a: a[::-1].copy()[::-1],
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.float32, offset=1).reshape(a.shape),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_of_any_kind(mlp: Session, case: str) -> None:
    plain = np.random.default_rng(0).standard_normal((3, 128), np.float32)
    array = ARRAYS[case](plain)
    assert np.array_equal(mlp(x=array)["output"], mlp(x=plain)["output"])


def test_arrays_without_a_torch_dtype(mlp: Session) -> None:
    assert message(lambda: mlp(x=np.array([["a"] * 128]))) == "input 'x': dtype is <U1, allowed float32"
    assert message(lambda: mlp(x=np.zeros((1, 128), object))) == "input 'x': dtype is object, allowed float32"


def test_numpy_has_no_bfloat16(odd: Session) -> None:
    arrays = {"x": np.zeros((2, 3), np.float32), "ids": np.zeros(2, np.int64), "scale": np.float32(1)}
    assert message(lambda: odd(**arrays)) == "output 'half' is bfloat16, which numpy does not have"
    assert odd(**(arrays | {"scale": torch.tensor(1.0)}))["half"].dtype == torch.bfloat16


def test_tensors_with_gradients_and_subclasses(mlp: Session) -> None:
    x = torch.randn(2, 128)
    wanted = mlp(x=x)["output"]
    for same in (nn.Parameter(x), x.clone().requires_grad_(), (x.clone().requires_grad_() * 1)):
        got = mlp(x=same)["output"]
        assert torch.equal(got, wanted) and not got.requires_grad and type(got) is Tensor
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            assert torch.equal(mlp(x=x)["output"], wanted)


class Elsewhere(Tensor):
    """A tensor whose elements are in another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory(mlp: Session) -> None:
    for tensor in (Elsewhere(torch.zeros(2, 128)), FakeTensorMode().from_tensor(torch.zeros(2, 128))):
        text = message(lambda tensor=tensor: mlp(x=tensor))
        assert text == f"input 'x': is a {type(tensor).__name__} without memory, allowed a torch tensor"


# --- memory ------------------------------------------------------------------------------------------------------


def test_outputs_belong_to_the_caller(odd: Session) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    inputs = {"x": x, "ids": torch.tensor([1, 2]), "scale": torch.tensor(2.0)}
    first = odd(**inputs)
    assert torch.equal(first["same"], x) and torch.equal(first["turned"], x.t())
    kept = {name: out.clone() for name, out in first.items()}
    odd(**inputs)
    x.zero_()
    assert all(torch.equal(first[name], kept[name]) for name in kept)
    untouched = list(first)
    for name, out in first.items():
        out.fill_(77)
        untouched.remove(name)
        assert all(torch.equal(first[other], kept[other]) for other in untouched), f"`{name}` shares memory"
    again = odd(**(inputs | {"x": kept["same"]}))
    assert torch.equal(again["fixed"], torch.arange(3.0))
    assert torch.equal(again["calls"], torch.full((2,), 3.0))
    assert torch.equal(again["scaled"], kept["scaled"])


def test_outputs_that_share_memory_in_the_runner(odd_bundle: Path, tmp_path: Path) -> None:
    x, ids = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
    inputs = {"x": x, "ids": ids, "scale": torch.tensor(2.0)}
    given, got = tmp_path / "inputs", tmp_path / "outputs"
    given.write_bytes(b"".join(map(bytes, golden.dump_case(golden.Case("", {}, inputs, {})))))
    with runner_stopwatch(native.find_runner(), odd_bundle, native.find_libtorch(), 1) as runner:
        for _ in range(3):  # a tensor that is let go of twice ends the process, now or later
            runner.time(Ask(str(given), {"batch": 2}, "", 10.0, calls=4, outputs=str(got)))
    outputs = {name.removeprefix("output."): tensor for name, tensor in load_tensors(got.read_bytes()).items()}
    assert torch.equal(outputs["same"], x) and torch.equal(outputs["same_again"], x)
    assert torch.equal(outputs["turned"], x.t()) and torch.equal(outputs["column"], torch.tensor([1.0, 4.0]))
    assert outputs["calls"].tolist() == outputs["calls_again"].tolist() == [4.0, 4.0]
    assert torch.equal(outputs["scaled_again"], outputs["scaled"])
    assert torch.equal(outputs["scaled_turned"], outputs["scaled"].t())
    assert torch.equal(outputs["scaled_columns"], outputs["scaled"][:, 1:])
    with load(odd_bundle) as session:
        assert torch.equal(session(**inputs)["scaled"], outputs["scaled"])


def test_state_is_counted_and_reset(stateful_bundle: Path, eager: Eager) -> None:
    first, second = load(stateful_bundle), load(stateful_bundle)
    model = eager("stateful")
    for rows in (1, 2, 3, 8):
        x = torch.randn(rows, 4)
        wanted = model(x)
        for name, got in first(x=x).items():
            torch.testing.assert_close(got, wanted[name])
    assert first(x=torch.zeros(1, 4))["count"].item() == 15
    assert second(x=torch.zeros(1, 4))["count"].item() == 1, "sessions share no state"
    first.reset_state()
    assert first(x=torch.zeros(2, 4))["count"].item() == 2
    with torch.inference_mode():
        first.reset_state()
        assert load(stateful_bundle)(x=torch.zeros(2, 4))["count"].item() == 2
    assert first(x=torch.zeros(2, 4))["count"].item() == 2


def test_bundles_one_after_another(mlp_bundle: Path, stateful_bundle: Path, mixed_bundle: Path, eager: Eager) -> None:
    """glibc takes a library for one that it has when the path is the same: paths must not come back for others."""
    x = torch.randn(2, 128)
    for _ in range(2):
        with load(stateful_bundle) as session:
            assert session(x=torch.zeros(3, 4))["count"].item() == 3
        with load(mlp_bundle) as session:
            torch.testing.assert_close(session(x=x)["output"], eager("mlp")(x))
        with load(mixed_bundle) as session:
            assert list(session.call(mixed_inputs())) == [o.name for o in session.contract.outputs]


def test_weights_are_mapped_and_not_copied(mlp_bundle: Path) -> None:
    session = load(mlp_bundle)
    inode = mlp_bundle.stat().st_ino
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if int(fields[4]) == inode:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            spans.append((start, end))
    constants = session._libraries["dynamic"]._constants.values()
    assert constants
    assert all(any(a <= t.data_ptr() < b for a, b in spans) for t in constants)


# --- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 5, 33, 64])
def test_padded_to_a_bucket_and_cut_back(mlp: Session, eager: Eager, rows: int) -> None:
    x = torch.randn(rows, 128)
    got = mlp.call({"x": x}, pad=True)["output"]
    assert got.shape == (rows, 10)
    torch.testing.assert_close(got, eager("mlp")(x))


def test_what_the_model_gets_when_padded(session_over: Callable[..., Session]) -> None:
    """By hand: 3 rows of 5 become 4 of 8, with the pad value of each input; one output is twice as long plus 1."""
    contract = Contract(
        dims=(Dim(name="batch", min=1, max=8), Dim(name="seq", min=1, max=16)),
        inputs=(
            Input(name="ids", dtype="int64", shape=("batch", "seq"), pad=7),
            Input(name="bias", dtype="float32", shape=("seq",), pad=0.5),
        ),
        outputs=(
            Output(name="double", dtype="float32", shape=("batch", "2*seq+1")),
            Output(name="pairs", dtype="int64", shape=("batch*2", 3)),
        ),
        batch_dim="batch",
    )
    seen: list[list[Tensor]] = []

    def model(tensors: list[Tensor]) -> list[Tensor]:
        seen.append(tensors)
        rows, seq = tensors[0].shape
        return [torch.arange(rows * (2 * seq + 1)).float().reshape(rows, -1), torch.arange(rows * 6).reshape(-1, 3)]

    session = session_over(contract, model, {"batch": (1, 2, 4, 8), "seq": (8, 16)})
    ids, bias = torch.ones(3, 5, dtype=torch.int64), torch.ones(5)
    outputs = session.call({"ids": ids, "bias": bias}, pad=True)
    assert seen[0][0].tolist() == [[1] * 5 + [7] * 3] * 3 + [[7] * 8]
    assert seen[0][1].tolist() == [1.0] * 5 + [0.5] * 3
    assert outputs["double"].tolist() == [[17.0 * row + column for column in range(11)] for row in range(3)]
    assert outputs["pairs"].tolist() == torch.arange(18).reshape(6, 3).tolist()
    session(ids=ids, bias=bias)
    assert [tuple(t.shape) for t in seen[1]] == [(3, 5), (5,)]
    session(ids=ids, bias=bias, _pad=True)
    assert [tuple(t.shape) for t in seen[2]] == [(4, 8), (8,)]


def test_more_rows_than_a_batch_are_split(session_over: Callable[..., Session]) -> None:
    """By hand: 9 rows in batches of 2 to 4; the last one is filled up. What has no rows goes to each."""
    contract = Contract(
        dims=(Dim(name="batch", min=2, max=4), Dim(name="seq", min=1, max=8)),
        inputs=(
            Input(name="bias", dtype="int64", shape=("seq",)),
            Input(name="ids", dtype="int64", shape=("batch", "seq"), pad=7),
        ),
        outputs=(Output(name="pairs", dtype="int64", shape=("batch*2", "seq")),),
        batch_dim="batch",
    )
    seen: list[Tensor] = []

    def model(tensors: list[Tensor]) -> list[Tensor]:
        seen.append(tensors[1])
        return [(tensors[0] + tensors[1]).repeat_interleave(2, 0)]

    ids, bias = torch.arange(18).reshape(9, 2), torch.tensor([0, 100])
    session = session_over(contract, model)
    outputs = session(bias=bias, ids=ids)
    assert [tensor.tolist() for tensor in seen] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
        [[16, 17], [7, 7]],
    ]
    assert outputs["pairs"].tolist() == [[2 * row, 2 * row + 101] for row in range(9) for _ in range(2)]
    assert message(lambda: session(bias=bias, ids=ids[:1])) == "input 'ids': axis 0 is 1, allowed 2..4 (batch)"
    wide = torch.zeros(9, 9, dtype=torch.int64)
    assert message(lambda: session(bias=bias, ids=wide)) == "input 'ids': axis 1 is 9, allowed 1..8 (seq)"
    stateful = msgspec.structs.replace(contract, state=(State(name="count", dtype="int64", shape=()),), batch_dim=None)
    refused = message(lambda: session_over(stateful, model)(bias=bias, ids=ids))
    assert refused == "input 'ids': axis 0 is 9, allowed 2..4 (batch)"


# --- threads, processes, life ------------------------------------------------------------------------------------


def test_threads_get_their_own_answers(mlp: Session, eager: Eager) -> None:
    inputs = [torch.randn(1 + i % 5, 128) for i in range(24)]
    wanted = [eager("mlp")(x) for x in inputs]
    faults: list[int] = []

    def call(first: int) -> None:
        for step in range(300):
            index = (first + step) % len(inputs)
            if not torch.allclose(mlp(x=inputs[index])["output"], wanted[index], atol=1e-6):
                faults.append(index)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_closed(mlp_bundle: Path) -> None:
    session = load(mlp_bundle)
    outputs = session(x=torch.zeros(1, 128))
    session.close()
    session.close()
    for call in (lambda: session(x=torch.zeros(1, 128)), session.reset_state):
        assert message(call, ClosedError) == "the session is closed"
    assert outputs["output"].sum().item() == pytest.approx(1)


def test_after_a_fork(mlp: Session) -> None:
    child = os.fork()
    if child == 0:
        try:
            mlp(x=torch.zeros(1, 128))
        except UsageError:
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def test_a_model_that_fails(session_over: Callable[..., Session]) -> None:
    contract = Contract(
        dims=(),
        inputs=(Input(name="x", dtype="float32", shape=(2,)),),
        outputs=(Output(name="y", dtype="float32", shape=(2,)),),
    )

    def fail(tensors: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("index 7 is out of bounds\nException raised from somewhere")

    session = session_over(contract, fail)
    assert message(lambda: session(x=torch.zeros(2)), ModelError) == "the model failed: index 7 is out of bounds"


ALONE = """
import os, sys, torch
from mctl.runner.session import load
before = set(os.listdir("."))
session = load(sys.argv[1], threads=1)
print(torch.get_num_threads(), round(session(x=torch.zeros(2, 128))["output"].sum().item(), 3))
assert set(os.listdir(".")) == before
children = open(f"/proc/self/task/{os.getpid()}/children").read()
assert not children, children
"""


def test_loading_needs_no_compiler_no_home_and_no_disk(mlp_bundle: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    environment = {"PATH": "", "TMPDIR": str(tmp_path / "nowhere"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", ALONE, str(mlp_bundle)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 2.0\n"), done.stderr


# --- bundles that must not be loaded -----------------------------------------------------------------------------


def mapped_libraries() -> set[str]:
    """The memory files of compiled code that this process has mapped."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mctl-" in line}


def rewritten(bundle: Path, path: Path, **target: object) -> Path:
    """The bundle, as if it had been compiled for something else."""
    with archives.open_bundle(bundle) as source:
        assert source.manifest.target is not None
        changed = msgspec.structs.replace(source.manifest.target, **target)
        archives.rewrite(source, path, msgspec.structs.replace(source.manifest, target=changed), {})
    return path


def test_another_machines_code_is_never_mapped(mlp_bundle: Path, tmp_path: Path) -> None:
    with archives.open_bundle(mlp_bundle) as source:
        assert source.manifest.target is not None
        features = (*source.manifest.target.features, "avx1024")
    before = mapped_libraries()
    path = rewritten(mlp_bundle, tmp_path / "later.pt2", features=features)
    assert "`avx1024`" in message(lambda: load(path), HostError)
    path = rewritten(mlp_bundle, tmp_path / "glibc.pt2", glibc="9.1")
    assert "glibc 9.1" in message(lambda: load(path), HostError)
    assert mapped_libraries() == before


def flipped(bundle: Path, path: Path, member: str) -> Path:
    """The bundle with one bit of a member changed."""
    with archives.open_bundle(bundle) as source:
        entry = source.members[member]
    data = bytearray(bundle.read_bytes())
    data[entry.offset + entry.size // 2] ^= 1
    path.write_bytes(data)
    return path


def test_changed_members_are_named(mlp_bundle: Path, tmp_path: Path) -> None:
    with archives.open_bundle(mlp_bundle) as source:
        library = source.manifest.variants[0].library
    weights = flipped(mlp_bundle, tmp_path / "weights.pt2", WEIGHTS)
    code = flipped(mlp_bundle, tmp_path / "code.pt2", library)
    assert WEIGHTS in message(lambda: load(weights), BundleError)
    assert library in message(lambda: load(code), BundleError)
    assert library in message(lambda: load(code, verify=False), BundleError), "code is always hashed"
    load(weights, verify=False).close()


def test_what_is_no_bundle(mlp_program: Path, tmp_path: Path) -> None:
    assert "is a program" in message(lambda: load(mlp_program), WrongKindError)
    (tmp_path / "text.pt2").write_text("hello")
    assert "not a bundle" in message(lambda: load(tmp_path / "text.pt2"), WrongKindError)
    assert message(lambda: load(tmp_path / "none.pt2"), UsageError).startswith("there is no file")
    assert message(lambda: load(mlp_program, threads=0), UsageError) == "`threads` is 0, allowed 1 or more"

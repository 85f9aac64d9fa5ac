"""model.py to program.pt2: the contract, what is stored, and that stock torch reads it."""

import stat
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load as load_safetensors

from mctl.bundle_format.archive import Archive
from mctl.bundle_format.contract import Constant, Contract, Dim, Input, Output, State, evaluate
from mctl.bundle_format.errors import BundleError, UsageError, WrongKindError
from mctl.bundle_format.manifest import Tolerance
from mctl.export import cases, program
from mctl.export.golden import load_golden
from mctl.export.program import load_program, run_exported
from mctl.export.source import eager, load_source

from .models import export, forward, write

LINEAR = forward("return self.layer(x)", init="self.layer = nn.Linear(8, 4)")


def contract_of(folder: Path, body: str, *options: str, **more: object) -> Contract:
    return export(write(folder, body), *options, **more).manifest.contract


# --- the contract ------------------------------------------------------------------------------------------------


def test_a_plain_model(tmp_path: Path) -> None:
    assert contract_of(tmp_path, LINEAR, "--dim batch=1:64") == Contract(
        dims=(Dim(name="batch", min=1, max=64),),
        inputs=(Input(name="x", dtype="float32", shape=("batch", 8)),),
        outputs=(Output(name="output", dtype="float32", shape=("batch", 4)),),
        batch_dim="batch",
    )


NESTED = """
import dataclasses
from collections import namedtuple
Pair = namedtuple("Pair", "left right")
@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    weights: dict
@dataclasses.dataclass
class Result:
    rows: torch.Tensor
    twice: torch.Tensor
    loss: torch.Tensor | None = None
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)
    def forward(self, batch, pair, *, times, flag=None):
        rows = self.table(batch.ids[:, 1:].int()) * batch.weights["w"][0] * times
        return Result(rows, torch.cat([rows, rows], 1) + pair.left.sum() + pair.right)
example_inputs = {
    "batch": Batch(torch.randint(0, 50, (3, 5)), {"w": [torch.randn(3, 1, 1)]}),
    "pair": Pair(torch.randn(2), torch.tensor(2.0)),
    "times": 3,
    "flag": None,
}
"""
NESTED_DIMS = ("--dim batch=1:8@batch.ids:0,batch.weights.w.0:0", "--dim seq=2:16@batch.ids:1")


def test_nested_inputs_constants_and_named_outputs(tmp_path: Path) -> None:
    report = export(write(tmp_path, NESTED), *NESTED_DIMS, "--pad batch.ids=0")
    contract = report.manifest.contract
    assert contract.inputs == (
        Input(name="batch.ids", dtype="int64", shape=("batch", "seq"), range=(0, 49), pad=0),
        Input(name="batch.weights.w.0", dtype="float32", shape=("batch", 1, 1)),
        Input(name="pair.left", dtype="float32", shape=(2,)),
        Input(name="pair.right", dtype="float32", shape=()),
    )
    assert contract.constants == (Constant(name="times", value=3), Constant(name="flag", value=None))
    assert contract.outputs == (
        Output(name="rows", dtype="float32", shape=("batch", "seq - 1", 4)),
        Output(name="twice", dtype="float32", shape=("batch", "2*seq - 2", 4)),
    )
    assert contract.batch_dim == "batch"
    assert "output `loss` is None and left out" in report.notes


def test_the_program_needs_none_of_the_users_classes(tmp_path: Path) -> None:
    """It is read where the model file is not: in the process that compiles."""
    report = export(write(tmp_path, NESTED), *NESTED_DIMS)
    exported = torch.export.load(report.path)
    case = load_golden(Archive.open(report.path))[2]
    found = exported.module(check_guards=False)(*case.inputs.values())
    assert list(found) == ["rows", "twice"]
    assert all(found[name].allclose(value) for name, value in case.outputs.items())


def test_an_input_option_supplies_a_whole_example(tmp_path: Path) -> None:
    body = "class model(nn.Module):\n    def forward(self, a, b): return a @ b\n"
    contract = contract_of(
        tmp_path, body, "--dim n=1:9", "--dim m=1:9", "--input b=float32[4,m]", "--input a=float32[n,4]"
    )
    assert [(each.name, each.shape) for each in contract.inputs] == [("a", ("n", 4)), ("b", (4, "m"))]
    assert contract.outputs[0].shape == ("n", "m")


def test_an_input_option_replaces_a_part_of_the_example(tmp_path: Path) -> None:
    body = NESTED.replace("torch.randint(0, 50, (3, 5))", "torch.zeros(1, 1)")
    dims = ("--dim batch=1:8@batch.weights.w.0:0", "--dim seq=2:16")
    contract = contract_of(tmp_path, body, *dims, "--input batch.ids=int32[batch,seq]")
    assert contract.inputs[0] == Input(name="batch.ids", dtype="int32", shape=("batch", "seq"), range=(0, 49))


@pytest.mark.parametrize(("file", "name"), [("my model.py", "my_model"), ("modèle.py", "modele"), ("a+b.py", "a_b")])
def test_a_name_is_made_of_the_files(tmp_path: Path, file: str, name: str) -> None:
    report = export(write(tmp_path, LINEAR, file), "--dim batch=1:64")
    assert report.manifest.name == name and load_program(report.path).manifest == report.manifest


def test_a_name_that_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, LINEAR, "a+b.py")
    assert export(path, name="ranker-2").manifest.name == "ranker-2"
    with pytest.raises(UsageError, match="`a b` cannot be the name of a model"):
        export(path, name="a b")


def test_output_names(tmp_path: Path) -> None:
    body = forward("return x, x.sum(1)")
    contract = contract_of(tmp_path, body, "--dim batch=1:8", output_names=("copy", "total"))
    assert [output.name for output in contract.outputs] == ["copy", "total"]
    (golden, *_) = load_golden(Archive.open(tmp_path / "model.pt2"))
    assert golden.outputs["total"].equal(golden.inputs["x"].sum(1))


@pytest.mark.parametrize(
    ("code", "options", "more", "batch_dim", "note"),
    [
        ("return x", ("--dim rows=1:8",), {}, "rows", ""),
        ("return x", ("--dim rows=1:8",), {"batch_dim": "none"}, None, "the export asked for none"),
        ("return x.repeat_interleave(3, 0)", ("--dim batch=1:8",), {}, "batch", ""),
        ("return x.repeat(3, 1)", ("--dim batch=1:8",), {}, None, "rows of a batch depend on each other"),
        ("return x - x.mean(0)", ("--dim batch=1:8",), {}, None, "rows of a batch depend on each other"),
        ("return x.T", ("--dim batch=1:8",), {}, None, "batch: output 'output' does not have it as axis 0"),
        ("return x.sum()", ("--dim batch=1:8",), {}, None, "batch: output 'output' does not have it as axis 0"),
        ("return x", ("--dim wide=1:8@x:1",), {}, None, "no dim is axis 0 of every input"),
        ("return x", ("--dim wide=1:8@x:1", "--dim n=1:8@x:0"), {"batch_dim": "n"}, "n", ""),
        ("return x", ("--dim batch=2:8:2",), {}, None, "batch: it has a multiple"),
        ("return x + torch.rand(8)", ("--dim batch=1:8",), {"allow_random": True}, None, "draws random numbers"),
    ],
)
def test_the_batch_dim(
    tmp_path: Path, code: str, options: tuple[str, ...], more: dict[str, object], batch_dim: str | None, note: str
) -> None:
    contract = contract_of(tmp_path, forward(code), *options, **more)
    assert contract.batch_dim == batch_dim and note in contract.batch_note and bool(note) == bool(contract.batch_note)


def test_a_batch_dim_that_cannot_be_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`--batch-dim batch`: output 'output' does not have it as axis 0"):
        contract_of(tmp_path, forward("return x.sum()"), "--dim batch=1:8", batch_dim="batch")


@pytest.mark.parametrize(
    ("code", "rows", "found"),
    [
        ("return self.table(x)", 30, (0, 29)),
        ("return self.table(x.long()[:, ::2].contiguous())", 30, (0, 29)),
        ("return F.embedding_bag(x.long(), self.table.weight)", 30, (0, 29)),
        ("return self.table(x) + self.second(x)", 30, (0, 9)),
        ("return self.table(x + 1)", 30, None),
        ("return self.table(torch.arange(x.shape[1])) + x.unsqueeze(-1)", 30, None),
    ],
)
def test_value_ranges_are_found_from_embeddings(
    tmp_path: Path, code: str, rows: int, found: tuple[int, int] | None
) -> None:
    init = f"self.table = nn.Embedding({rows}, 4)\nself.second = nn.Embedding(10, 4)"
    body = forward(code, "torch.ones(2, 6, dtype=torch.int32)", init)
    assert contract_of(tmp_path, body, "--dim batch=1:8").inputs[0].range == found


INDEXING = {
    "rows of as many as came": ("x[idx]", ("-n", "n-1")),
    "rows that are added to": ("torch.zeros_like(x).index_add(0, idx, y)", (0, "n-1")),
    "both": ("torch.zeros_like(x).index_add(0, idx, x[idx])", (0, "n-1")),
    "gathered": ("torch.gather(x, 0, idx.unsqueeze(1).expand(-1, 3))", (0, "n-1")),
    "rows of a sum of dims": ("torch.cat([x, y])[idx]", ("-k-n", "k+n-1")),
    "rows of a table": ("self.table[idx]", (-20, 19)),
    "rows of a table and of as many as came": ("self.table[idx] + x[idx]", ("-n", "n-1")),
    "an index that is computed": ("self.table[idx * 2 - 1]", None),
}


@pytest.mark.parametrize("case", INDEXING)
def test_value_ranges_are_found_from_what_is_indexed(tmp_path: Path, case: str) -> None:
    code, wanted = INDEXING[case]
    body = f"""
    class model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 3))
        def forward(self, x, idx, y):
            return {code}, x + self.table[0], y + 1
    example_inputs = (torch.randn(7, 3), torch.tensor([0, 6, 2, 2, 5]), torch.randn(5, 3))
    """
    options = ("--dim n=2:9@x:0", "--dim k=1:40@idx:0,y:0")
    inputs = {each.name: each for each in contract_of(tmp_path, body, *options, batch_dim="none").inputs}
    assert inputs["idx"].range == wanted


EDGES = """
class model(nn.Module):
    def forward(self, x, edges):
        gathered = torch.zeros_like(x).index_add(0, edges[1] - 0, x[edges[0] + 0])
        return x + gathered
example_inputs = {"x": torch.randn(7, 6), "edges": torch.randint(0, 7, (2, 11))}
"""
EDGE_DIMS = ("--dim nodes=2:50@x:0", "--dim edges=1:200@edges:1")


def test_a_range_over_dims(tmp_path: Path) -> None:
    report = export(write(tmp_path, EDGES), *EDGE_DIMS, "--range edges=0:nodes-1", batch_dim="none")
    assert report.manifest.contract.inputs[1].range == (0, "nodes-1")
    with Archive.open(report.path) as archive:
        for case in load_golden(archive):  # eager would have raised, too
            assert case.inputs["edges"].min() >= 0 and case.inputs["edges"].max() < case.dims["nodes"]
    with pytest.raises(UsageError, match="`--range edges`: the dim `node` is not declared"):
        export(write(tmp_path, EDGES), *EDGE_DIMS, "--range edges=0:node-1", batch_dim="none")


def test_a_range_option_goes_before_what_is_found(tmp_path: Path) -> None:
    body = forward("return self.table(x)", "torch.ones(2, 6, dtype=torch.int64)", "self.table = nn.Embedding(30, 4)")
    contract = contract_of(tmp_path, body, "--dim batch=1:8", "--range x=3:7", "--pad x=3")
    assert contract.inputs[0].range == (3, 7) and contract.inputs[0].pad == 3
    for case in load_golden(Archive.open(tmp_path / "model.pt2")):
        assert case.inputs["x"].min() >= 3 or case.inputs["x"].eq(1).all()


# --- dims --------------------------------------------------------------------------------------------------------


def test_a_range_from_1_stands_though_torch_specialises_1(tmp_path: Path) -> None:
    body = forward("return self.layer(x)", "torch.randn(1, 8)", "self.layer = nn.Linear(8, 4)")
    report = export(write(tmp_path, body), "--dim batch=1:64")
    exported = torch.export.load(report.path)
    assert [(limits.lower, limits.upper) for limits in exported.range_constraints.values()] == [(1, 64)]
    run, wanted = run_exported(load_program(report.path)), eager(load_source(str(tmp_path / "model.py")))
    for batch in range(1, 65):
        x = {"x": torch.randn(batch, 8)}
        assert run(x)["output"].equal(wanted(x)["output"])
    assert report.notes[0].startswith("traced with an example of batch=2, made from the given one (batch=1)")


def test_only_what_is_declared_is_dynamic(tmp_path: Path) -> None:
    body = forward("return x.flatten(1)", "torch.randn(4, 4, 4)")
    export(write(tmp_path, body), "--dim batch=1:8")
    exported = torch.export.load(tmp_path / "model.pt2")
    (x,) = (node for node in exported.graph.nodes if node.op == "placeholder")
    assert [isinstance(size, int) for size in x.meta["val"].shape] == [False, True, True]


def test_a_multiple(tmp_path: Path) -> None:
    body = forward("return x.reshape(-1, 4, 8).sum(1), x.repeat(2, 1)", "torch.randn(12, 8)")
    contract = contract_of(tmp_path, body, "--dim n=4:64:4")
    assert contract.dims == (Dim(name="n", min=4, max=64, multiple=4),)
    assert [output.shape for output in contract.outputs] == [("n//4", 8), ("2*n", 8)]
    run = run_exported(load_program(tmp_path / "model.pt2"))
    for size in range(4, 65, 4):
        x = torch.randn(size, 8)
        assert run({"x": x})["output_0"].allclose(x.reshape(-1, 4, 8).sum(1))


def test_the_size_behind_a_multiple_is_known_when_a_program_is_read(tmp_path: Path) -> None:
    """torch's compiler asks for multiples of the example's size."""
    export(write(tmp_path, LINEAR), "--dim batch=2:48:2")
    graph = load_program(tmp_path / "model.pt2").exported.graph
    rows = next(node.meta["val"] for node in graph.nodes if node.name == "x").shape[0].node
    assert rows.shape_env.guarding_hint_or_throw(rows.expr * 4) == rows.hint * 4


def test_a_small_example_that_makes_another_size_1(tmp_path: Path) -> None:
    """torch 2.13 takes a size of 1 for fixed, also one inside the model: mctl traces again with larger ones."""
    body = forward("return x[:, 1:] * 2", "torch.randn(2, 2)")
    report = export(write(tmp_path, body), "--dim batch=1:8", "--dim seq=2:64@x:1")
    assert report.manifest.contract.outputs[0].shape == ("batch", "seq - 1")
    run = run_exported(load_program(report.path))
    assert run({"x": torch.ones(3, 64)})["output"].equal(torch.full((3, 63), 2.0))


CAUSAL = forward(
    "n = x.shape[1]\nreturn (x @ x.transpose(1, 2)).masked_fill(self.mask[:n, :n] == 0, -1e9).softmax(-1) @ x",
    "torch.randn(2, 5, 8)",
    "self.register_buffer('mask', torch.ones(64, 64).tril())",
)


def test_a_table_that_is_cut_works_up_to_its_size(tmp_path: Path) -> None:
    """torch's guard excludes the table's own size; mctl proves that size instead."""
    report = export(write(tmp_path, CAUSAL), "--dim batch=1:4", "--dim seq=1:64@x:1")
    assert "batch=2,seq=64" in report.proven
    run, wanted = run_exported(load_program(report.path)), eager(load_source(str(tmp_path / "model.py")))
    for seq in (1, 2, 63, 64):
        x = {"x": torch.randn(3, seq, 8)}
        assert run(x)["output"].allclose(wanted(x)["output"], atol=1e-6)


# --- state, randomness, inputs that change -----------------------------------------------------------------------

COUNTER = forward(
    "self.inner.count.add_(x.shape[0])\nreturn x + self.inner.count",
    init="self.inner = nn.Module()\nself.inner.register_buffer('count', torch.zeros(1))",
)


def test_changed_buffers_are_state(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, COUNTER, "--dim batch=1:8")
    assert contract.state == (State(name="inner.count", dtype="float32", shape=(1,)),)
    assert contract.batch_dim is None and "keeps state between calls (inner.count)" in contract.batch_note
    opened = load_program(tmp_path / "model.pt2")
    for _ in range(2):  # each in a fresh state
        run = run_exported(opened)
        assert [float(run({"x": torch.zeros(3, 8)})["output"][0, 0]) for _ in range(3)] == [3, 6, 9]
    for case in load_golden(opened.archive):  # each from the first state
        assert case.outputs["output"].equal(case.inputs["x"] + case.dims["batch"])


CACHE = """
class Layer:
    def __init__(self):
        self.keys = torch.zeros(4, 3)
class model(nn.Module):
    def __init__(self, registered={registered}):
        super().__init__()
        self.layers = {{"all": [Layer(), Layer()]}}
        for at, layer in enumerate(self.layers["all"] if registered else ()):
            self.register_buffer(f"keys_{{at}}", layer.keys, persistent=False)
    def forward(self, x, pos):
        for layer in self.layers["all"]:
            layer.keys.index_copy_(0, pos, x)
            x = x + layer.keys.sum(0)
        return x
example_inputs = {{"x": torch.randn(1, 3), "pos": torch.tensor([1])}}
"""


@pytest.mark.parametrize(
    ("registered", "names"),
    [(True, ["keys_0", "keys_1"]), (False, ["layers_all_0_keys", "layers_all_1_keys"])],
)
def test_state_in_plain_objects(tmp_path: Path, registered: bool, names: list[str]) -> None:
    path = write(tmp_path, CACHE.format(registered=registered))
    report = export(path, batch_dim="none")
    contract = report.manifest.contract
    assert [state.name for state in contract.state] == names and contract.inputs[1].range == (0, 3)
    program, model = load_program(report.path), load_source(str(path)).model
    run = run_exported(program)
    for pos in (0, 2, 2, 3):
        x = torch.full((1, 3), float(pos + 1))
        with torch.no_grad():
            assert torch.equal(run({"x": x, "pos": torch.tensor([pos])})["output"], model(x, torch.tensor([pos])))


HOOKED = """
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)
        self.kept = {}
        self.features.register_forward_hook(lambda module, args, out: self.kept.__setitem__("features", out))
        with torch.no_grad():
            self(torch.randn(2, 8))  # an output of another call is there already
    def forward(self, x):
        y = self.head(self.features(x))
        return y, self.kept["features"].mean(-1)
example_inputs = {"x": torch.randn(3, 8)}
"""


def test_a_hook_that_keeps_an_output_for_later(tmp_path: Path) -> None:
    path = write(tmp_path, HOOKED)
    report = export(path, "--dim batch=1:8")
    model, x = load_source(str(path)).model, torch.randn(5, 8)
    with torch.no_grad():
        wanted = model(x)
    got = run_exported(load_program(report.path))({"x": x})
    for name, tensor in zip(("output_0", "output_1"), wanted, strict=True):
        torch.testing.assert_close(got[name], tensor)


def test_a_random_model_has_no_golden_cases(tmp_path: Path) -> None:
    body = forward("return x + torch.randn_like(x)")
    report = export(write(tmp_path, body), "--dim batch=1:8", allow_random=True)
    assert report.manifest.contract.random and report.manifest.golden == ()
    assert any("no golden cases are stored" in note for note in report.notes)


def test_a_model_that_changes_its_input_works_on_a_copy(tmp_path: Path) -> None:
    report = export(write(tmp_path, forward("x.mul_(2)\nreturn x + 1")), "--dim batch=1:8")
    assert any("changes its input x in place" in note for note in report.notes)
    x = torch.ones(2, 8)
    torch.export.load(report.path).module()(x)
    assert x.eq(1).all()


@pytest.mark.parametrize(
    ("code", "init"),
    [
        ("return self.norm(x.repeat(2, 1))", "self.norm = nn.BatchNorm1d(8, track_running_stats=False)"),
        ("return self.drop(x)", "self.drop = nn.Dropout(0.5)"),
        ("return F.dropout(x, 0.0)", ""),
        ("return x * self.scale", "self.scale = torch.tensor(2.0)"),
        ("self.last = x * 2\nreturn self.last", ""),
        ("if self.table is None:\n    self.table = torch.ones(8)\nreturn x * self.table", "self.table = None"),
        ("return self.layer(x * 1)", "self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))"),
        ("return self.layer(x)", "self.layer = torch.compile(nn.Linear(8, 8))"),
        ("return x, x, x.T, torch.ones(3)", ""),
        ("with torch.enable_grad():\n    return x + 1", ""),
        ("return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))", ""),
        ("return x * 2", "self.register_forward_hook(lambda m, args, result: result + args[0])"),
        ("return x.half(), x.bfloat16(), x.double(), x > 0, x.to(torch.int16)", ""),
    ],
)
def test_models_that_look_doubtful_and_are_not(tmp_path: Path, code: str, init: str) -> None:
    report = export(write(tmp_path, forward(code, init=init)), "--dim batch=1:8")
    assert max(report.proven.values()) == 0 and report.manifest.contract.state == ()


@pytest.mark.parametrize("most", [20, 20_000])
def test_every_other_column(tmp_path: Path, most: int) -> None:
    """Two columns become one, which torch takes for a size of its own."""
    report = export(write(tmp_path, forward("return x[:, ::2]")), "--dim batch=1:8@x:0", f"--dim n=2:{most}@x:1")
    assert report.manifest.contract.outputs[0].shape[0] == "batch"
    assert evaluate(report.manifest.contract.outputs[0].shape[1], {"batch": 1, "n": 7}) == 4


# --- the file ----------------------------------------------------------------------------------------------------


def test_golden_cases_are_eager_over_the_range(tmp_path: Path) -> None:
    path = write(tmp_path, LINEAR)
    report = export(path, "--dim batch=1:64")
    found = load_golden(Archive.open(report.path))
    assert {case.dims["batch"] for case in found} == {1, 6, 7, 32, 64}  # ends, the example, a prime, the middle
    layer = load_source(str(path)).model.layer
    for case in found:
        exact = case.inputs["x"].double() @ layer.weight.double().T + layer.bias.double()
        assert case.outputs["output"].double().allclose(exact, rtol=1e-5, atol=1e-6)
    assert report.manifest.tolerances == {"output": Tolerance(rtol=1e-4, atol=1e-5)}


def test_golden_members_are_safetensors(tmp_path: Path) -> None:
    report = export(write(tmp_path, forward("return x.bfloat16(), x > 0")), "--dim batch=1:4")
    archive = Archive.open(report.path)
    for golden, case in zip(report.manifest.golden, load_golden(archive), strict=True):
        stored = load_safetensors(archive.read(golden.member))
        assert stored["input.x"].equal(case.inputs["x"]) and stored["output.output_1"].equal(case.outputs["output_1"])
        assert stored["output.output_0"].equal(case.inputs["x"].bfloat16())


def test_a_damaged_golden_member_is_named(tmp_path: Path) -> None:
    report = export(write(tmp_path, LINEAR), "--dim batch=1:4")
    golden = report.manifest.golden[0].member
    entry = Archive.open(report.path).members[golden]
    data = bytearray(report.path.read_bytes())
    data[entry.offset + entry.size - 1] ^= 1
    report.path.write_bytes(data)
    with pytest.raises(BundleError, match=golden):
        load_golden(Archive.open(report.path))


def test_the_budget_of_golden_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MAX_BYTES", 2000)
    report = export(write(tmp_path, LINEAR), "--dim batch=1:64")
    assert [golden.name for golden in report.manifest.golden] == ["batch=1", "batch=6", "batch=7"]
    assert "case batch=64 is proven, but not stored: it has 0 MB" in report.notes and "batch=64" in report.proven


def test_cases_that_are_too_large_are_not_run(tmp_path: Path) -> None:
    report = export(write(tmp_path, forward("return x * 2", "torch.randn(4)")), "--dim n=1:1000000000000")
    assert "n=4" in report.proven and all(int(name.removeprefix("n=")) < 10**8 for name in report.proven)
    assert any(note.startswith("case n=1000000000000 is left out: its inputs have") for note in report.notes)


def test_stock_torch_opens_the_program(tmp_path: Path) -> None:
    report = export(write(tmp_path, LINEAR), "--dim batch=1:64")
    x = torch.randn(5, 8)
    wanted = eager(load_source(str(tmp_path / "model.py")))({"x": x})["output"]
    assert torch.export.load(report.path).module()(x)["output"].equal(wanted)


def test_weights_of_a_file_are_in_the_program(tmp_path: Path) -> None:
    torch.save({"layer.weight": torch.ones(4, 8), "layer.bias": torch.zeros(4)}, tmp_path / "trained.pt")
    report = export(write(tmp_path, LINEAR), "--dim batch=1:4", weights=tmp_path / "trained.pt")
    assert run_exported(load_program(report.path))({"x": torch.ones(2, 8)})["output"].eq(8).all()
    assert report.manifest.source.weights == "trained.pt" and len(report.manifest.source.weights_sha256) == 64


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    path = write(tmp_path, LINEAR)
    first = export(path, "--dim batch=1:8").path.read_bytes()
    second = export(path, "--dim batch=1:8")
    assert second.path.read_bytes() == first and second.manifest.created == "2023-11-14T22:13:20+00:00"


def test_fp64_leaves_the_program_as_it_is(tmp_path: Path) -> None:
    export(write(tmp_path, LINEAR), "--dim batch=1:4")
    opened = load_program(tmp_path / "model.pt2")
    assert run_exported(opened, double=True)({"x": torch.ones(2, 8).double()})["output"].dtype == torch.float64
    assert run_exported(opened)({"x": torch.ones(2, 8)})["output"].dtype == torch.float32


def test_what_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "x.pt2").write_text("hello")
    with pytest.raises(WrongKindError):
        load_program(tmp_path / "x.pt2")


def test_a_program_that_torch_cannot_read(tmp_path: Path) -> None:
    report = export(write(tmp_path, LINEAR), "--dim batch=1:4")
    archive = Archive.open(report.path)
    broken = tmp_path / "broken.pt2"
    program.archives.rewrite(archive, broken, msgspec.structs.replace(report.manifest), {"models/model.json": b"{}"})
    with pytest.raises(BundleError, match="torch cannot read"):
        _ = load_program(broken).exported


@pytest.mark.parametrize("place", ["missing/program.pt2", "folder"])
def test_places_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    path = write(tmp_path, "raise RuntimeError('not reached')")
    request = program.ExportRequest(spec=str(path), output=tmp_path / place)
    with pytest.raises(UsageError, match="cannot write"):
        program.export_model(request, lambda text: None)


def test_an_earlier_program_stays_when_the_export_fails(tmp_path: Path) -> None:
    path = write(tmp_path, LINEAR)
    before = export(path, "--dim batch=1:4").path.read_bytes()
    path.write_text(path.read_text().replace("self.layer(x)", "self.layer(x).item()"))
    with pytest.raises(Exception, match="the model fails"):
        export(path, "--dim batch=1:4")
    assert (tmp_path / "model.pt2").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "model.pt2").stat().st_mode) & 0o400

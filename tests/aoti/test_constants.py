import pytest
import torch

from mctl.aoti.constants import is_dense, make_dense, store
from mctl.bundle_format.errors import CompileError
from mctl.bundle_format.tensors import dump, read_header

TENSORS = {
    "row_major": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset": torch.arange(10.0)[3:7],
    "scalar": torch.tensor(2.5),
    "flags": torch.tensor([True, False, True]),
    "halves": torch.rand(3, 2, dtype=torch.bfloat16).t(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 4),
    "column": torch.rand(4, 1).t(),
    "holes": torch.arange(32.0).reshape(8, 4)[::2, ::2],
    "repeated": torch.rand(1, 4).expand(3, 4),
    "overlapping": torch.arange(8.0).as_strided((3, 4), (1, 1)),
    "parameter": torch.nn.Parameter(torch.rand(4, 6)[:, ::3], requires_grad=False),
}


def test_is_dense_agrees_with_torch() -> None:
    for name, tensor in TENSORS.items():
        assert is_dense(tensor.shape, tensor.stride()) == torch.ops.aten.is_non_overlapping_and_dense(tensor), name


def test_make_dense_copies_only_what_a_file_cannot_hold() -> None:
    tensors = dict(TENSORS)
    make_dense(tensors)
    changed = {name for name in tensors if tensors[name] is not TENSORS[name]}
    assert changed == {"holes", "repeated", "overlapping", "parameter"}
    assert isinstance(tensors["parameter"], torch.nn.Parameter)
    for name in changed:
        assert tensors[name].is_contiguous()
        assert torch.equal(tensors[name], TENSORS[name])


def test_each_constant_is_read_back_as_it_was() -> None:
    tensors = dict(TENSORS)
    make_dense(tensors)
    unique, references = store(tensors, state=["scalar"])
    file = b"".join(map(bytes, dump(unique)))
    entries = read_header(file, aligned=True)
    for name, tensor in tensors.items():
        reference = references[name]
        entry = entries[reference.tensor]
        dtype = getattr(torch, entry.dtype)
        flat = torch.frombuffer(bytearray(file[entry.begin : entry.end]) or bytearray(8), dtype=dtype)
        stride = reference.stride or torch.empty(entry.shape, device="meta").stride()
        assert torch.equal(flat.as_strided(entry.shape, stride), tensor), name
        assert reference.state == (name == "scalar")


def test_equal_constants_are_stored_once() -> None:
    weight = torch.rand(4, 4)
    constants = {"tied": weight, "also": weight, "copy": weight.clone(), "other": torch.rand(4, 4), "bits": weight.t()}
    unique, references = store(constants, state=[])
    assert list(unique) == ["tied", "other"]
    assert {name for name, reference in references.items() if reference.tensor == "tied"} == set(constants) - {"other"}
    assert references["tied"].stride is None
    assert references["bits"].stride == (1, 4)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(2, dtype=torch.complex64), "a complex64 tensor"),
        (torch.eye(3).to_sparse(), "a torch.sparse_coo float32 tensor"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "a float8_e4m3fn tensor"),
    ],
)
def test_what_no_file_can_hold(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(CompileError, match=f"constant `w` is {kind}, which a bundle cannot hold"):
        store({"w": tensor}, state=[])

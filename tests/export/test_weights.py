"""Weights from a file: what is taken, what is refused, and what is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from mctl.bundle_format.errors import ExportError, UsageError
from mctl.export.weights import load_weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(value.equal(other.state_dict()[key]) for key, value in one.state_dict().items())


@pytest.mark.parametrize(
    "write",
    [
        lambda state, path: save_file(state, path),
        lambda state, path: torch.save(state, path),
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda state, path: torch.save({"state_dict": state, "epoch": 3}, path),
        lambda state, path: torch.save({"model": state, "loss": 0.5}, path),
    ],
    ids=["safetensors", "checkpoint", "legacy", "nested", "model"],
)
def test_the_kinds_of_file(tmp_path: Path, write: Any) -> None:
    trained, model = Net(), Net()
    trained.norm.running_mean.normal_()
    write(trained.state_dict(), tmp_path / "w.bin")
    load_weights(model, tmp_path / "w.bin")
    assert same(trained, model)


def test_dtypes_become_the_models(tmp_path: Path) -> None:
    trained, model = Net(), Net()
    save_file(
        {key: v.half() if v.is_floating_point() else v for key, v in trained.state_dict().items()}, tmp_path / "w"
    )
    load_weights(model, tmp_path / "w")
    assert model.first.weight.dtype == torch.float32
    assert model.first.weight.equal(trained.first.weight.half().float())


def test_a_model_without_storage_takes_the_mapped_tensors(tmp_path: Path) -> None:
    trained = Tied()
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    with torch.device("meta"):
        model = Tied()
    load_weights(model, tmp_path / "w.pt")
    assert same(trained, model)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    trained, model = Tied(), Tied()
    save_model(trained, str(tmp_path / "w.safetensors"))
    load_weights(model, tmp_path / "w.safetensors")
    assert same(trained, model) and model.head.weight is model.embedding.weight


def faulty(change: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    state = {**Net().state_dict(), **change}
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (faulty({"first.bias": None}), "1 missing (first.bias)"),
        (faulty({"extra": torch.ones(1)}), "1 unexpected (extra)"),
        (faulty({"first.bias": torch.ones(5)}), "1 misshapen (first.bias is [5], the model has [4])"),
        (faulty({"norm.num_batches_tracked": torch.tensor(0.5)}), "is float32, the model has int64"),
        (faulty({f"k{n:02}": torch.ones(1) for n in range(12)}), "12 unexpected (k00, "),
        (faulty({f"k{n:02}": torch.ones(1) for n in range(12)}), "k09 and 2 more)"),
    ],
)
def test_weights_that_do_not_fit_are_listed(tmp_path: Path, state: dict[str, torch.Tensor], why: str) -> None:
    torch.save(state, tmp_path / "w.pt")
    model = Net()
    before = model.first.weight.clone()
    with pytest.raises(ExportError) as refused:
        load_weights(model, tmp_path / "w.pt")
    assert why in refused.value.message and model.first.weight.equal(before)


def test_tied_weights_that_differ_in_the_file(tmp_path: Path) -> None:
    state = {"embedding.weight": torch.ones(5, 4), "head.weight": torch.zeros(5, 4)}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ExportError, match="tied in the model, but not equal in the file"):
        load_weights(Tied(), tmp_path / "w.safetensors")


def test_a_prefix_is_pointed_out(tmp_path: Path) -> None:
    torch.save({f"net.{key}": value for key, value in Net().state_dict().items()}, tmp_path / "w.pt")
    with pytest.raises(ExportError) as refused:
        load_weights(Net(), tmp_path / "w.pt")
    assert "the keys of the file begin with `net.`" in str(refused.value.hint)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_wrappers_prefix_is_taken_off(tmp_path: Path, prefix: str) -> None:
    """As DataParallel and `torch.compile` save."""
    trained, model = Net(), Net()
    torch.save({f"{prefix}{key}": value for key, value in trained.state_dict().items()}, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert all(value.equal(model.state_dict()[key]) for key, value in trained.state_dict().items())


def test_a_module_of_that_name_keeps_it(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    trained, model = Outer(), Outer()
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert all(value.equal(model.state_dict()[key]) for key, value in trained.state_dict().items())


def test_a_checkpoint_that_needs_more_than_tensors(tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "whole.pt")
    with pytest.raises(ExportError) as refused:
        load_weights(Net(), tmp_path / "whole.pt")
    assert "needs more than tensors: it needs `" in refused.value.message
    assert "torch.save(model.state_dict(), …)" in str(refused.value.hint)


@pytest.mark.parametrize("data", [b"", b"not weights at all", b"PK\x03\x04 cut", b"\x80\x02cut"])
def test_files_that_are_no_weights(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(ExportError, match=r"`w\.pt`"):
        load_weights(Net(), tmp_path / "w.pt")


def test_a_cut_safetensors_file(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ExportError, match="no sound safetensors file"):
        load_weights(Net(), tmp_path / "w.safetensors")


def test_a_checkpoint_without_names(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "w.pt")
    with pytest.raises(ExportError, match="holds no named tensors"):
        load_weights(Net(), tmp_path / "w.pt")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        load_weights(Net(), tmp_path / "w.pt")

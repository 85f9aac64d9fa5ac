import pytest

from mctl.aoti.plan import choose_buckets, covers, parse_buckets
from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.errors import UsageError


def contract(*, pad: int | None = None, batch: tuple[int, int] = (1, 64)) -> Contract:
    return Contract(
        dims=(Dim(name="batch", min=batch[0], max=batch[1]), Dim(name="seq", min=4, max=96, multiple=4)),
        inputs=(Input(name="ids", dtype="int64", shape=("batch", "seq"), pad=pad),),
        outputs=(Output(name="y", dtype="float32", shape=("batch", 8)),),
        batch_dim="batch",
    )


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 64), (1, 2, 4, 8, 16, 32, 64)),
        ((1, 48), (1, 2, 4, 8, 16, 32, 48)),
        ((3, 10), (3, 4, 8, 10)),
        ((5, 7), (5, 7)),
        ((1, 2), (1, 2)),
    ],
)
def test_the_batch_dim_has_powers_of_two_and_both_ends(batch: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert choose_buckets(contract(batch=batch), {}) == {"batch": expected}


def test_buckets_that_were_asked_for_always_end_with_the_largest_size() -> None:
    wanted = parse_buckets(["batch=8,1", "seq=16, 32"])
    assert choose_buckets(contract(pad=0), wanted) == {"batch": (1, 8, 64), "seq": (16, 32, 96)}


def test_without_a_batch_dim_there_are_no_buckets() -> None:
    plain = contract()
    unbatched = Contract(dims=plain.dims, inputs=plain.inputs, outputs=plain.outputs)
    assert choose_buckets(unbatched, {}) == {}


def test_the_dynamic_variant_covers_every_dim() -> None:
    assert covers(contract()) == {"batch": (1, 64), "seq": (4, 96)}


@pytest.mark.parametrize(
    "option", ["batch", "batch=", "=1", "batch=1,,2", "batch=x", "batch=-1", "batch=1.5", "batch=²"]
)
def test_a_bucket_that_is_no_list_of_numbers(option: str) -> None:
    with pytest.raises(UsageError, match="is not understood"):
        parse_buckets([option])


def test_a_dim_named_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_buckets(["batch=1", "batch=2"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("batch=65", "bucket 65 of dim `batch` is outside its range, allowed 1..64"),
        ("batch=0", "bucket 0 of dim `batch` is outside its range, allowed 1..64"),
        ("rows=1", "`--bucket` names the dim `rows`, which the program does not have"),
        ("seq=16", "dim `seq` has no buckets: input `ids` has no value to pad it with"),
    ],
)
def test_a_bucket_that_the_contract_does_not_allow(option: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_buckets(contract(), parse_buckets([option]))
    assert caught.value.message == message


def test_a_bucket_that_is_no_multiple() -> None:
    with pytest.raises(UsageError, match=r"allowed 4\.\.96 in steps of 4"):
        choose_buckets(contract(pad=0), {"seq": (10,)})

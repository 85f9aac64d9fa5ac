import pytest

from mctl.aoti.plan import DYNAMIC, candidates, choose_buckets, covers, parse_buckets, points, threads_of
from mctl.aoti.protocol import Recipe
from mctl.bundle_format.contract import Contract, Dim, Input, Output, State
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


# --- candidates --------------------------------------------------------------------------------------------------

BASE = Recipe(DYNAMIC, packed=True)


def names(level: str, base: Recipe = BASE, *, bf16: bool = False, seq: tuple[int, ...] = (16, 96)) -> list[str]:
    buckets = {"batch": (1, 64), "seq": seq} if seq else {"batch": (1, 64)}
    found = candidates(contract(pad=0), buckets, base, level, bf16=bf16, threads=2)  # type: ignore[arg-type]
    assert len({recipe.name for recipe in found}) == len(found)
    return [recipe.name for recipe in found]


def test_the_most_promising_come_first_and_the_ends_before_what_is_between() -> None:
    static = ["batch1-seq16", "batch64-seq96", "batch1-seq96", "batch64-seq16"]
    small = ["batch1-seq16", "batch1-seq96"]
    assert names("fast") == ["plain", *(f"packed-{at}" for at in static), *(f"gemm-{at}" for at in small)]
    full = names("full", bf16=True)
    assert full[:2] == ["bf16", "plain"]
    assert {
        f"{kind}-{at}" for kind in ("packed", "plain", "gemm", "gemm-aten", "bf16", "packed-threads2") for at in static
    } == {*full[2:]}
    assert names("none") == []


def test_a_base_of_torchs_own_kernels_is_compared_with_packed_ones() -> None:
    assert names("fast", Recipe(DYNAMIC))[0] == "packed"


def test_what_mctls_kernels_have_no_layer_of_is_not_compiled_twice() -> None:
    buckets = {"batch": (1, 64), "seq": (96,)}
    found = candidates(contract(pad=0), buckets, BASE, "full", bf16=True, threads=2, layers=False)
    assert {recipe.name.split("-")[0] for recipe in found} == {"plain", "gemm"}
    assert all(recipe.dims and not recipe.packed and not recipe.bf16 for recipe in found)


def test_a_model_of_one_size_has_each_way_once() -> None:
    fixed = Contract(dims=(), inputs=contract().inputs, outputs=contract().outputs)
    found = candidates(fixed, {}, BASE, "full", bf16=True, threads=2)
    assert [recipe.name for recipe in found] == ["bf16", "plain", "gemm", "gemm-aten", "packed-threads2"]


def test_static_variants_are_for_sizes_that_are_all_padded_to() -> None:
    assert names("full", seq=()) == ["plain"]


def test_the_users_settings_are_those_of_every_candidate() -> None:
    base = Recipe(DYNAMIC, packed=True, options=("epilogue_fusion=false",))
    found = candidates(contract(pad=0), {"batch": (1, 64), "seq": (96,)}, base, "full", bf16=False, threads=4)
    assert all(recipe.options[0] == "epilogue_fusion=false" for recipe in found)
    assert {threads_of(recipe) for recipe in found} == {0, 4}
    assert {recipe.packed for recipe in found if threads_of(recipe) == 4} == {True}


def test_a_model_with_state_keeps_its_one_variant() -> None:
    plain = contract(pad=0)
    stateful = Contract(
        dims=plain.dims, inputs=plain.inputs, outputs=plain.outputs, state=(State(name="n", dtype="int64", shape=()),)
    )
    assert candidates(stateful, {}, BASE, "full", bf16=True, threads=1) == []


def test_points_are_all_buckets_or_fewer_and_the_largest_always() -> None:
    small = points(contract(), {"batch": (1, 8, 64)})
    assert small == [{"batch": batch, "seq": 20} for batch in (1, 8, 64)]  # the root of 4 * 96, in steps of 4
    many = points(contract(pad=0), {"batch": (1, 2, 4, 8, 16, 32, 64), "seq": (16, 32, 64, 96)})
    assert len(many) <= 16 and many[-1] == {"batch": 64, "seq": 96}


@pytest.mark.parametrize(
    ("most", "batch"), [(16, (1, 2, 4, 8, 16, 32, 64)), (6, (1, 4, 16, 64)), (2, (1, 64)), (1, (64,))]
)
def test_fewer_points_are_both_ends_and_what_is_between(most: int, batch: tuple[int, ...]) -> None:
    found = points(contract(), {"batch": (1, 2, 4, 8, 16, 32, 64)}, most)
    assert [point["batch"] for point in found] == [*batch]


def test_what_a_static_variant_covers() -> None:
    assert covers(contract(), {"batch": 8, "seq": 32}) == {"batch": (8, 8), "seq": (32, 32)}

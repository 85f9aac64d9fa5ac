import pytest

from mctl.aoti.inductor import settings
from mctl.bundle_format.errors import UsageError


def chosen(*options: str, march: str | None = "x86-64-v3", stateful: bool = False) -> dict[str, object]:
    return settings(options, march, "/usr/bin/g++", stateful=stateful)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("max_autotune=true", "max_autotune", True),
        ("max_autotune=False", "max_autotune", False),
        ("max_autotune_gemm_backends=ATEN,CPP", "max_autotune_gemm_backends", "ATEN,CPP"),
        ("cpp.min_chunk_size=1024", "cpp.min_chunk_size", 1024),
        ("cpp.gemm_cache_blocking=4,1,10", "cpp.gemm_cache_blocking", "4,1,10"),
        ("cpp.gemm_cache_blocking=none", "cpp.gemm_cache_blocking", None),
        ("cpp.dynamic_threads=false", "cpp.dynamic_threads", False),
        ("aot_inductor.custom_op_libs=a,b", "aot_inductor.custom_op_libs", ["a", "b"]),
    ],
)
def test_an_option_takes_the_type_that_torch_declares(option: str, key: str, value: object) -> None:
    assert chosen(option)[key] == value


@pytest.mark.parametrize(
    ("option", "message", "hint"),
    [
        ("freezin=true", "inductor has no option `freezin`", "near it: `freezing`"),
        ("simdlen=4", "inductor has no option `simdlen`", "near it: `cpp.simdlen`"),
        ("max_autotune=7x", "`--inductor max_autotune` takes bool, not `7x`", None),
        ("cpp.min_chunk_size=few", "`--inductor cpp.min_chunk_size` takes int, not `few`", None),
        ("max_autotune", "`--inductor max_autotune` is not understood", "write it as `--inductor max_autotune=true`"),
        ("cpp.march=native", "`--inductor cpp.march` cannot be changed", "use `--target`, or the variable CXX"),
    ],
)
def test_an_option_that_is_none(option: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(option)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_what_a_bundle_needs_cannot_be_changed() -> None:
    with pytest.raises(UsageError, match=r"a bundle needs `aot_inductor\.link_libtorch=False`"):
        chosen("aot_inductor.link_libtorch=true")


def test_the_target_and_the_compiler_are_set() -> None:
    assert chosen()["cpp.march"] == "x86-64-v3"
    assert chosen()["cpp.cxx"] == (None, "/usr/bin/g++")
    assert "cpp.march" not in chosen(march=None)


def test_every_setting_is_one_of_torch() -> None:
    from torch._inductor import config

    assert set(chosen(stateful=True)) <= set(config.get_config_copy())

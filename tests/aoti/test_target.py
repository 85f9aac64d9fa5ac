import pytest

from mctl.aoti import target
from mctl.aoti.target import machine_for, require_runs_here
from mctl.bundle_format.errors import HostError, UsageError
from mctl.bundle_format.host import LEVELS, cpu_features, isa_level


def test_a_level_is_its_flags_and_nothing_else() -> None:
    machine = machine_for("x86-64-v3", ["no-compiler"])
    assert machine.march == "x86-64-v3"
    assert set(machine.features) == set(LEVELS["x86-64-v3"])
    # https://gitlab.com/x86-psABIs/x86-64-ABI, table 3.1
    assert {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "cx16", "popcnt"} <= set(machine.features)
    assert not [flag for flag in machine.features if flag.startswith("avx512")]


def test_native_is_what_the_compiler_may_use_here() -> None:
    machine = machine_for("native", ["g++"])
    assert machine.march is None
    assert machine.isa == isa_level()
    assert set(LEVELS[machine.isa]) <= set(machine.features) <= cpu_features()


def test_instructions_for_bfloat16_are_a_feature() -> None:
    """The kernels use them where the compiler may."""
    assert ("avx512_bf16" in machine_for("native", ["g++"]).features) == ("avx512_bf16" in cpu_features())
    assert "avx512_bf16" not in machine_for("x86-64-v4", ["no-compiler"]).features


def test_native_by_a_compiler_that_knows_less() -> None:
    """`true` defines no macro: only the level itself is needed."""
    machine = machine_for("native", ["true"])
    assert set(machine.features) == set(LEVELS[machine.isa])


def test_an_unknown_target() -> None:
    with pytest.raises(UsageError) as caught:
        machine_for("x86-64-v9", ["g++"])
    assert caught.value.hint == "choose one of native, x86-64-v2, x86-64-v3, x86-64-v4"


def test_a_target_above_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "cpu_features", lambda: frozenset(LEVELS["x86-64-v3"]))
    require_runs_here("x86-64-v3")
    require_runs_here("native")
    with pytest.raises(HostError, match=r"cannot run x86-64-v4 code, .* it has no avx512f, avx512bw") as caught:
        require_runs_here("x86-64-v4")
    assert "--no-parity" in (caught.value.hint or "")

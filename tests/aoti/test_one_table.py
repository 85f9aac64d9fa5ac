"""Numbers that Python and the C++ beside it both have are the same."""

import re
from pathlib import Path

from mctl.aoti import packing
from mctl.aoti.ops import Activation
from mctl.runner.stopwatch import SPIN_COUNT

ROOT = Path(__file__).parents[2]


def found(path: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))


def test_packed_weights_have_the_kernels_sizes() -> None:
    assert found("aoti/kernels/product.h", r"kPanel = (\d+);") == [str(packing.PANEL)]
    assert max(map(int, found("aoti/kernels/vector.h", r"kLanes = (\d+);"))) == packing.VECTOR
    assert found("aoti/kernels/conv2d.cc", r"kLeast = (\d+);") == [str(packing.DEPTHWISE)]


def test_activations_have_the_kernels_numbers() -> None:
    [names] = found("aoti/kernels/activation.h", r"enum class Activation : std::int64_t \{([^}]*)\}")
    assert [name.strip().upper() for name in names.split(",")] == [a.name for a in sorted(Activation)]
    assert sorted(Activation) == list(range(len(Activation)))


def test_idle_threads_spin_as_in_the_server() -> None:
    assert found("runner/cpp/model/host_library.cc", r'"GOMP_SPINCOUNT", "(\d+)"') == [SPIN_COUNT]

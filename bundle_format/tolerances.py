"""How far floats may be from eager's, by dtype: for export, parity, and the golden cases that a worker replays."""

from typing import NamedTuple


class Closeness(NamedTuple):
    """Directly: |got - wanted| <= atol + rtol * |wanted|. The floor, a few roundings of the dtype: |got - wanted| <=
    floor * (|wanted| + mean of |wanted|).
    """

    rtol: float
    atol: float
    floor: float


# runner/cpp/model/compare.cc has the floors too; tests/vectors/contract/tolerances.json holds both.
CLOSENESS = {
    "float64": Closeness(1e-9, 1e-9, 1e-9),
    "float32": Closeness(1e-4, 1e-5, 1e-5),
    "float16": Closeness(1e-3, 1e-3, 1e-3),
    "bfloat16": Closeness(1e-2, 1e-2, 8e-3),
}
EXACT = Closeness(0, 0, 0)  # integers and booleans

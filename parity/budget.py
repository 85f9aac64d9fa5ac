"""How much time and memory the checks may take: what a next call would cost is guessed from those before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..bundle_format.contract import Contract
from .cases import MAX_BYTES, volume, work

CALL_SECONDS = 20.0
Dims = Mapping[str, int]


class Seen(NamedTuple):
    work: float
    seconds: float
    bytes: int


@dataclass(slots=True)
class Budget:
    """Says why a call at some sizes is not worth its cost, which is guessed from the largest call so far."""

    contract: Contract
    seconds: float  # in all
    memory: int = 0  # bytes a call may add; 0: a quarter of what is free
    spent: float = 0.0
    _seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = self.memory or available_memory() // 4

    def record(self, dims: Dims, seconds: float, added: int) -> None:
        """A call at these sizes took `seconds` and `added` bytes of memory."""
        self.spent += seconds
        self._seen.append(Seen(work(self.contract, dims), seconds, added))

    def refuse(self, dims: Dims) -> str:
        """The reason not to make this call, or ""."""
        if (total := volume(self.contract, dims)) > MAX_BYTES:
            return f"{size(total)} of inputs and outputs, allowed {size(MAX_BYTES)}"
        seconds, added = self._guess(work(self.contract, dims))
        if seconds > CALL_SECONDS:
            return f"about {seconds:.0f} s, allowed {CALL_SECONDS:.0f} s a case"
        if self.spent + seconds > self.seconds:
            return f"about {seconds:.1f} s, and {self.spent:.0f} of {self.seconds:.0f} s are used"
        if added > self.memory:
            return f"about {size(added)} of memory, allowed {size(self.memory)}"
        return ""

    def _guess(self, wanted: float) -> tuple[float, float]:
        """Seconds and bytes: a fixed part, that of the cheapest call, and a part that grows with the work."""
        if not self._seen:
            return 0.0, 0.0
        fixed, largest = min(seen.seconds for seen in self._seen), max(self._seen)
        factor = max(1.0, wanted / largest.work)
        return fixed + factor * (largest.seconds - fixed), factor * largest.bytes


def available_memory() -> int:
    """Bytes that can be taken without swapping; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 4 << 30


def size(count: float) -> str:
    """`3.2 GB`."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

"""How much time and memory the checks may take: what a next call would cost is guessed from those before it."""

from dataclasses import dataclass, field
from pathlib import Path

from .cases import MAX_BYTES

CALL_SECONDS = 10.0
GROWTH = 1.5  # cost grows as volume to this power, where it is not known: between linear layers and attention


@dataclass(slots=True)
class Budget:
    """Says why a call of a volume (bytes of inputs and outputs) is not worth its cost, once smaller ones were seen."""

    seconds: float  # in all
    memory: int = 0  # bytes a call may add; 0: a quarter of what is free
    spent: float = 0.0
    _seen: list[tuple[int, float, int]] = field(default_factory=list)  # volume, seconds, bytes

    def __post_init__(self) -> None:
        self.memory = self.memory or available_memory() // 4

    def record(self, volume: int, seconds: float, added: int) -> None:
        """A call of `volume` took `seconds` and `added` bytes of memory."""
        self.spent += seconds
        self._seen.append((volume, seconds, added))

    def refuse(self, volume: int) -> str:
        """The reason not to make this call, or ""."""
        if volume > MAX_BYTES:
            return f"{size(volume)} of inputs and outputs, allowed {size(MAX_BYTES)}"
        seconds, added = self._guess(volume)
        if seconds > CALL_SECONDS:
            return f"about {seconds:.0f} s, allowed {CALL_SECONDS:.0f} s a case"
        if self.spent + seconds > self.seconds:
            return f"about {seconds:.1f} s, and {self.spent:.0f} of {self.seconds:.0f} s are used"
        if added > self.memory:
            return f"about {size(added)} of memory, allowed {size(self.memory)}"
        return ""

    def _guess(self, volume: int) -> tuple[float, float]:
        if not self._seen:
            return 0.0, 0.0
        smaller = [seen for seen in self._seen if seen[0] <= volume]
        base, seconds, added = max(smaller) if smaller else min(self._seen)
        factor = max(1.0, volume / max(base, 1)) ** GROWTH
        return seconds * factor, added * factor


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

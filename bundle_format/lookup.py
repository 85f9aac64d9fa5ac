"""Which variant runs, by sizes and threads, and what sizes are padded to. runner/cpp/format/lookup.cc follows the same
rules, by the same vectors.

1. The choices of a bundle that count are those for as many threads as an instance has; else those for the largest
   smaller number that was measured; else those for the smallest. Of these, not those of a variant that is compiled for
   more threads than the instance has.
2. The first of them that has room for the sizes and whose variant covers them says which variant runs. A writer puts
   them in order of volume, so that this is the next larger one.
3. Where none has room, the last of them whose variant covers the sizes says it; else it is the first variant that
   covers them.
4. A size is padded to its bucket, the first that holds it; without one it stays. A batch stays too where all choices of
   its bucket say so.
5. Other dims are padded so that requests can share a batch: nothing is where they cannot (no batch dim, or state).
"""

from collections.abc import Container, Iterable, Mapping

from .manifest import Choice, Manifest, Variant


class Lookup:
    """The rules for one bundle and one number of threads."""

    def __init__(self, manifest: Manifest, threads: int) -> None:
        self._variants = manifest.variants
        self._by_name = {variant.name: variant for variant in manifest.variants}
        choices = _for_threads(manifest.tuning.choices if manifest.tuning else (), threads)
        self._choices = [choice for choice in choices if self._by_name[choice.variant].threads <= threads]

    def variant(self, dims: Mapping[str, int]) -> Variant | None:
        """The variant for these sizes; None if none covers them."""
        fitting = [choice for choice in self._choices if covers(self._by_name[choice.variant], dims)]
        with_room = (choice for choice in fitting if all(dims[name] <= size for name, size in choice.dims.items()))
        if choice := next(with_room, fitting[-1] if fitting else None):
            return self._by_name[choice.variant]
        return next((variant for variant in self._variants if covers(variant, dims)), None)

    def unpadded(self, dim: str) -> tuple[int, ...]:
        """The buckets of `dim` up to which sizes run as they are."""
        pads: dict[int, bool] = {}
        for choice in self._choices:
            size = choice.dims[dim]
            pads[size] = pads.get(size, False) or choice.pad
        return tuple(sorted(size for size, pad in pads.items() if not pad))


def padded(size: int, buckets: Iterable[int], unpadded: Container[int] = ()) -> int:
    """Rule 4. `buckets` ascend; of those in `unpadded`, what they hold runs as it is."""
    bucket = next((bucket for bucket in buckets if bucket >= size), size)
    return size if bucket in unpadded else bucket


def covers(variant: Variant, dims: Mapping[str, int]) -> bool:
    return all(low <= dims[name] <= high for name, (low, high) in variant.covers.items())


def _for_threads(choices: tuple[Choice, ...], threads: int) -> list[Choice]:
    measured = {choice.threads for choice in choices}
    nearest = max((n for n in measured if n <= threads), default=min(measured, default=0))
    return [choice for choice in choices if choice.threads == nearest]

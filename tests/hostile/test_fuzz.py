"""Random damage to a small bundle: reading it ends well or in a BundleError, quickly and in little memory."""

import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mctl.bundle_format import contents, kinds, summary
from mctl.bundle_format.archive import Archive
from mctl.bundle_format.errors import BundleError

from .rawzip import pack
from .sound import GOLDEN, MANIFEST, WEIGHTS, changed, find, holding, sound

ROUNDS = 250
WHOLE = pack(sound())
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]
TOKENS = [b"1e999", b"-1", b"null", b"true", b"[]", b"{}", b'""', b"18446744073709551616", b"NaN", b'"\\ud800"', b"0.5"]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to three changes: bytes set, flipped, cut out, doubled, moved, or numbers of a header set to extremes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        length = rng.choice([1, 1, 2, 4, 8, rng.randint(1, 200)])
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice(INTERESTING)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            out[at : at + length] = rng.choice([b"\xff", b"\0"]) * length
        elif kind == 5:
            source = rng.randrange(len(out) + 1)
            out[at : at + length] = out[source : source + length]
        else:
            del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def headers_damaged(rng: random.Random) -> bytes:
    """Only the last bytes, where the directory is."""
    return WHOLE[:-900] + damaged(WHOLE[-900:], rng)


def manifest_damaged(rng: random.Random) -> bytes:
    text = find(sound(), MANIFEST).data
    return changed(MANIFEST, lambda part: setattr(part, "data", damaged(text, rng)))


def manifest_with_other_values(rng: random.Random) -> bytes:
    """Valid or almost valid JSON, with values of other kinds in it."""
    text = find(sound(), MANIFEST).data
    values = json.loads(text)
    spot, path = values, []
    while isinstance(spot, dict | list) and spot and (not path or rng.random() < 0.8):
        key = rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
        path.append((spot, key))
        spot = spot[key]
    holder, key = path[-1]
    holder[key] = "@@"
    text = json.dumps(values).encode().replace(b'"@@"', rng.choice(TOKENS))
    return changed(MANIFEST, lambda part: setattr(part, "data", text))


def tensors_damaged(rng: random.Random) -> bytes:
    name = rng.choice([WEIGHTS, GOLDEN])
    data = find(sound(), name).data
    size = 8 + int.from_bytes(data[:8], "little")
    return holding(name, damaged(data[:size], rng) + data[size:])


MAKERS: list[Callable[[random.Random], bytes]] = [
    lambda rng: damaged(WHOLE, rng),
    headers_damaged,
    manifest_damaged,
    manifest_with_other_values,
    tensors_damaged,
]


def read_all(path: Path) -> bool:
    """Everything that a reader does; False where it refuses."""
    kinds.identify(path)
    try:
        with Archive.open(path) as archive:
            summary.lines(summary.summarize(path))
            archive.verify()
            contents.check(archive)
    except BundleError:
        return False
    return True


@pytest.mark.parametrize("maker", range(len(MAKERS)))
def test_random_damage(maker: int, tmp_path: Path) -> None:
    rng = random.Random(maker)
    path = tmp_path / "bundle.pt2"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, passed = 0.0, 0
    for _ in range(ROUNDS):
        data = MAKERS[maker](rng)
        path.write_bytes(data)
        start = time.process_time()
        passed += read_all(path)
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
    assert passed < ROUNDS / 2  # the damage is real

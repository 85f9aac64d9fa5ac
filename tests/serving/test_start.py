"""`--start quick`: what it leaves out, and what it does not."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mctl.bundle_format import archive
from mctl.bundle_format.layout import VARIANTS

from . import faulty
from .faulty import INFER, Action, rows
from .server import Server, infer_binary, outputs_of
from .test_batching import eventually
from .test_faults import restarts

SOUND = rows((Action.ANSWER, 5))
WRONG = rows((Action.ATTEMPT, 0), (Action.ANSWER, 1))  # gives 0, the stored case says 1
FIRST = "case0"
Refusal = Callable[..., tuple[int, str]]


@pytest.fixture
def wrong_beside_sound(faulty_library: Path, tmp_path: Path) -> Path:
    """A wrong case, and a smaller one that is sound."""
    return faulty.bundle(faulty_library, tmp_path / "large.pt2", [WRONG, SOUND])


def test_quick_replays_the_smallest_case(wrong_beside_sound: Path, refusal: Refusal) -> None:
    code, told = refusal(wrong_beside_sound)
    assert (code, f"golden case `{FIRST}`" in told, "not what eager gave" in told) == (1, True, True)
    with Server(wrong_beside_sound, "--start", "quick") as server:
        answer = server.request(INFER, *infer_binary(x=rows((Action.ANSWER, 7))))
        assert outputs_of(answer)["y"] == 22


def test_both_refuse_a_model_that_is_wrong_in_the_smallest_case(
    faulty_library: Path, tmp_path: Path, refusal: Refusal
) -> None:
    larger = np.concatenate([SOUND] * 3)
    bundle = faulty.bundle(faulty_library, tmp_path / "small.pt2", [WRONG, larger])
    for start in ("full", "quick"):
        code, told = refusal(bundle, "--start", start)
        assert (code, f"golden case `{FIRST}`" in told) == (1, True), start


def test_quick_tries_every_variant(wrong_beside_sound: Path, tmp_path: Path, refusal: Refusal) -> None:
    """One that does not cover the smallest case replays the smallest that it covers."""
    with archive.open_bundle(wrong_beside_sound) as found:
        (dynamic,) = found.manifest.variants
        library = f"{VARIANTS}two/faulty.so"
        two = msgspec.structs.replace(dynamic, name="two", covers={"batch": (2, 2)}, library=library)
        manifest = msgspec.structs.replace(found.manifest, variants=(dynamic, two))
        archive.rewrite(found, tmp_path / "b.pt2", manifest, {library: found.read(dynamic.library)})
    code, told = refusal(tmp_path / "b.pt2", "--start", "quick")
    assert (code, f"golden case `{FIRST}`" in told) == (1, True)


def test_quick_checks_every_digest(wrong_beside_sound: Path, refusal: Refusal) -> None:
    """Also of the case that it does not replay."""
    data = bytearray(wrong_beside_sound.read_bytes())
    at = data.index(WRONG.tobytes())
    data[at] ^= 1
    wrong_beside_sound.write_bytes(data)
    code, told = refusal(wrong_beside_sound, "--start", "quick")
    assert code == 1 and f"{FIRST}.safetensors` does not have the SHA-256" in told


def test_quick_warms_what_it_has_time_for(faulty_library: Path, tmp_path: Path) -> None:
    """Every row naps for 6 ms: all buckets take more than 0.76 s, and those that a quick start has time for 0.2 s."""
    nap = (Action.NAP, Action.NAP)
    bundle = faulty.bundle(faulty_library, tmp_path / "b.pt2", (), most=128, buckets=(1, 16), values=nap)
    warm = 'mctl_load_seconds{phase="warmup"}'
    with Server(bundle) as full, Server(bundle, "--start=quick", "--latency-target-ms=5000") as quick:
        assert full.metrics()[warm] > 0.76 > quick.metrics()[warm]
        answer = quick.request(INFER, *infer_binary(x=rows(*[nap] * 128)))  # no batch was as large yet
        assert (outputs_of(answer)["y"] == 3 * Action.NAP + 1).all()


def test_a_model_that_refuses_what_it_is_warmed_with(faulty_library: Path, tmp_path: Path) -> None:
    """As one refuses offsets of bags that do not begin with 0. It is served."""
    bundle = faulty.bundle(faulty_library, tmp_path / "b.pt2", (), values=(Action.FAIL, Action.COST))
    with Server(bundle) as server:
        answer = server.request(INFER, *infer_binary(x=rows((Action.COST, Action.FAIL))))
        assert (outputs_of(answer)["y"] == 3 * Action.FAIL + 1).all()
        assert server.request(INFER, *infer_binary(x=rows((Action.FAIL, Action.FAIL)))).status == 500


def test_a_worker_that_started_quickly_is_not_taken_for_stuck(faulty_bundle: Path) -> None:
    """Nobody waits for the batch any more, and no warm-up has told how long batches take."""
    with Server(faulty_bundle, "--start=quick") as server:
        body, headers = infer_binary(x=rows((Action.NAP, 1500)))
        assert server.request(INFER, body, {**headers, "x-mctl-timeout-ms": "50"}).status == 504
        time.sleep(1.2)  # a full start would have replaced it after a second
        eventually(lambda: server.request(INFER, *infer_binary(x=SOUND)).status == 200)
        assert restarts(server) == {}


def test_nor_is_one_that_was_not_warmed_at_its_largest_sizes(minilm_bundle: Path) -> None:
    """Warming up ran short sequences only, which says nothing of how long one of 512 takes."""
    words = np.ones((1, 8), np.int64)
    body, headers = infer_binary(input_ids=words, attention_mask=words)
    path = "/v2/models/minilm/infer"
    with Server(minilm_bundle) as server:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        try:
            assert server.request(path, body, {**headers, "x-mctl-timeout-ms": "50"}).status == 504
            time.sleep(1.5)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert server.request(path, body, headers).status == 200
        assert server.workers() == [worker]


def test_what_it_takes(wrong_beside_sound: Path, refusal: Refusal) -> None:
    assert refusal(wrong_beside_sound, "--start=fast") == (
        2,
        "error: `--start` is `fast`, allowed full|quick\nhint: `mctl-runner --help` lists the options\n",
    )

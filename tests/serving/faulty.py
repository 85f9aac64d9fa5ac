"""A bundle whose model does to its process what a row asks for; no compiler of torch is needed to make it."""

import enum
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mctl.bundle_format import archive, tensors
from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.layout import BUNDLE_SCHEMA, GOLDEN, VARIANTS
from mctl.bundle_format.manifest import Golden, Manifest, Producer, Source, Target, Tolerance, Variant

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import load

from .server import infer_binary

INFER = "/v2/models/faulty/infer"
MOST_ROWS = 16
SOURCE = Path(__file__).with_name("faulty.cc")
LIBRARY = f"{VARIANTS}dynamic/faulty.so"
IMPORTS = ("create_tensor_from_blob", "delete_tensor_object", "get_data_ptr", "get_sizes", "dtype_int64")


class Action(enum.IntEnum):
    """The first number of a row. Warm-up fills in ones: answers."""

    ANSWER = 1  # 3 * value + 1, or with another factor
    CRASH = 2  # SIGSEGV
    ABORT = 3
    EXHAUST = 4  # takes so many MiB
    HANG = 5
    NAP = 6  # answers after so many milliseconds
    LEAVE = 7  # exit(value)
    FAIL = 8  # the call returns an error
    ATTEMPT = 9  # one of ATTEMPTS; the answer is 0 or errno
    COST = 10  # once a batch: it takes so many milliseconds, and a fifth of that for each row, pad rows among them


ATTEMPTS = (
    *("start a thread", "read a file", "map code", "signal itself"),
    *("exec", "socket", "write a file", "fork", "signal another", "ptrace", "unlink", "read another's memory"),
    *("bpf", "io_uring", "open for reading and writing"),
)
FREE = 4  # so many of them a model may


def rows(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64)


def right(x: np.ndarray, factor: int = 3) -> np.ndarray:
    """The answer to rows that only want one, or want it late."""
    return factor * x[:, 1:] + 1


def case(x: np.ndarray, **headers: str) -> load.Case:
    """A request for the load generator with the bytes of its answer."""
    body, fields = infer_binary(x=x)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return load.Case(load.http_request(INFER, body, {**fields, **named}), right(x).tobytes())


def library(folder: Path, factor: int = 3, beyond: str = "answer") -> Path:
    """The compiled model. With another factor it is another version: its numbers tell which one answered.

    `beyond`: what rows with a value above 1000 do that only want an answer: `fail`, `crash` or `slow`.
    """
    built = folder / f"faulty{factor}{beyond}.so"
    return compiled(SOURCE, built, f"-DFACTOR={factor}", f"-DBEYOND={beyond}")


def compiled(source: Path, built: Path, *options: str) -> Path:
    """A library with AOTInductor's interface, written by hand."""
    words = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*words, *options, "-I", str(Path(__file__).parent), "-o", str(built), str(source)], check=True)
    return built


def bundle(
    library: Path,
    path: Path,
    golden: Sequence[np.ndarray] = (rows((1, 5)),),
    most: int = MOST_ROWS,
    buckets: tuple[int, ...] = (1, 4, 16),
    values: tuple[int, int] | None = None,
    factor: int = 3,
    standalone: bool = False,
    name: str = "faulty",
) -> Path:
    """A bundle at `path` with these golden cases, rows up to `most`, and `values` that its input may hold.

    `factor` is the one that its golden cases are right for. `standalone`: its worker loads no libtorch.
    """
    members: list[tuple[str, archive.Data]] = [(LIBRARY, library)]
    cases = []
    for number, x in enumerate(golden):
        case = Golden(name=f"case{number}", member=f"{GOLDEN}case{number}.safetensors", dims={"batch": len(x)})
        stored = {"input.x": ("int64", x.shape, x.data), "output.y": ("int64", (len(x), 1), right(x, factor).data)}
        members.append((case.member, tensors.dump(stored)))
        cases.append(case)
    machine = platform.machine()
    manifest = Manifest(
        schema=BUNDLE_SCHEMA,
        name=name,
        version="1",
        created="2026-01-01T00:00:00+00:00",
        producer=Producer(mctl="0", torch="2.13.0"),
        source=Source(file="faulty.cc", sha256="0" * 64, model="model", seed=0),
        contract=Contract(
            dims=(Dim(name="batch", min=1, max=most),),
            inputs=(Input(name="x", dtype="int64", shape=("batch", 2), range=values),),
            outputs=(Output(name="y", dtype="int64", shape=("batch", 1)),),
            batch_dim="batch",
        ),
        golden=tuple(cases),
        tolerances={"y": Tolerance(rtol=0, atol=0)},
        standalone=standalone,
        members={},
        target=Target(os="linux", arch=machine, isa="x86-64-v2" if machine == "x86_64" else "aarch64"),
        buckets={"batch": (*(size for size in buckets if size < most), most)},
        variants=(
            Variant(
                name="dynamic",
                library=LIBRARY,
                covers={"batch": (1, most)},
                constants={},
                imports=tuple(f"aoti_torch_{name}" for name in IMPORTS),
            ),
        ),
    )
    archive.write(path, name, members, manifest)
    return path

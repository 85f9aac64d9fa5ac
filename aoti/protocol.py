"""What `mctl compile` and its child process say to each other: one line of JSON a message."""

import msgspec

from ..bundle_format.manifest import ConstantRef

LIBRARY, WEIGHTS = "model.so", "weights.safetensors"  # what the child leaves in its work folder


class Recipe(msgspec.Struct, frozen=True):
    """How one variant is compiled. `dims`: the sizes it is made for; empty: all that the contract allows."""

    name: str
    dims: dict[str, int] = {}
    packed: bool = False  # linear layers, convolutions and attention by mctl's own kernels, weights packed once
    bf16: bool = False  # products of those layers (not of attention) in bfloat16, with float32 sums
    options: tuple[str, ...] = ()  # KEY=VALUE for inductor


class Request(msgspec.Struct, frozen=True):
    """Everything the child needs; paths are absolute. The first line of its standard input."""

    program: str
    work: str  # an empty folder of its own
    remove: tuple[str, ...]  # what to remove when the parent dies
    compiler: str  # an executable, named as the compiler that it stands for
    march: str | None
    features: tuple[str, ...]  # what inductor may find on the CPU
    recipe: Recipe
    kept: str = ""  # the folder of what earlier compiles made; empty: there is none
    makers: str = ""  # the compiler and torch, by their versions


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A step begins."""

    name: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The variant lies in the work folder: LIBRARY, and its constants in WEIGHTS."""

    constants: dict[str, ConstantRef]
    peak_bytes: int  # of the largest process
    torch: str  # version
    torch_git: str
    callers: dict[str, tuple[str, ...]] = {}  # operator that was not compiled -> modules that it comes from
    by_name: tuple[str, ...] = ()  # operators that it calls by their names: "aten::linalg_solve_ex"
    layers: int = 0  # that mctl's kernels compute
    notes: tuple[str, ...] = ()  # what of mctl's changes to torch did not apply
    seconds: float = 0.0  # that compiling took, also where it was done before; the parent sees it


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No variant. `kind` is the name of an MctlError, or "bug" with a traceback as `message`."""

    kind: str
    message: str
    hint: str | None = None


Message = Phase | Done | Failed

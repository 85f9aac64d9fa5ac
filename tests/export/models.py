"""Models as source files, and `mctl export` of them inside this process."""

import textwrap
from pathlib import Path

from mctl.export.dims import parse_dim, parse_input, parse_pad, parse_range
from mctl.export.program import ExportReport, ExportRequest, export_model

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
"""


def write(folder: Path, body: str, name: str = "model.py") -> Path:
    """A model file: the usual imports, then `body`."""
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def forward(code: str, example: str = "torch.randn(6, 8)", init: str = "") -> str:
    """The body of a model file whose `forward(self, x)` is `code`."""
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in textwrap.dedent(init).splitlines()),
        "    def forward(self, x):",
        *(f"        {line}" for line in textwrap.dedent(code).splitlines()),
        "model = Model",
        f"example_inputs = ({example},)",
    ]
    return "\n".join(lines) + "\n"


def line_of(path: Path, mark: str = "# here") -> str:
    """`model.py:12` for the line that ends with the mark."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.endswith(mark):
            return f"{path.name}:{number}"
    raise AssertionError(f"no line of {path} ends with {mark}")


def export(path: Path | str, *options: str, **more: object) -> ExportReport:
    """As the command line does it: `export(path, "--dim batch=1:64", "--pad x=0")`."""
    values: dict[str, list[str]] = {"dim": [], "input": [], "range": [], "pad": []}
    for option in options:
        name, _, value = option.removeprefix("--").partition(" ")
        values[name].append(value)
    request = ExportRequest(
        spec=str(path),
        output=Path(str(path).partition(".py")[0]).with_suffix(".pt2"),
        dims=tuple(map(parse_dim, values["dim"])),
        inputs=tuple(map(parse_input, values["input"])),
        ranges=dict(map(parse_range, values["range"])),
        pads=dict(map(parse_pad, values["pad"])),
        **more,  # type: ignore[arg-type]
    )
    return export_model(request, lambda text: None)

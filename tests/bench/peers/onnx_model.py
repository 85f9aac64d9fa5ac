"""A sample as an ONNX file, for the peers: run by the Python of their environment.

python onnx_model.py samples/mlp.py mlp.onnx 0 '{"x": {"0": ["batch", 1, 64]}}'
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch


def main(source: str, target: str, seed: str, axes: str) -> None:
    """`seed`: the export's, which draws the same weights; `axes`: {input: {dynamic axis: [name, min, max]}}."""
    torch.manual_seed(int(seed))
    module = _module(Path(source))
    model, example = module.model().eval(), module.example_inputs()
    declared = {name: {int(a): d for a, d in of.items()} for name, of in json.loads(axes).items()}
    dims = {d[0]: torch.export.Dim(d[0], min=d[1], max=d[2]) for of in declared.values() for d in of.values()}
    shapes = {name: {axis: dims[d[0]] for axis, d in of.items()} for name, of in declared.items()}
    named = isinstance(example, dict)
    torch.onnx.export(
        model,
        () if named else example,
        target,
        kwargs=example if named else None,
        input_names=list(shapes),
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
    )


def _module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])

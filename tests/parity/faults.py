"""Bundles with one fault each, made from a good one; their digests are right, so that only parity can tell."""

from collections.abc import Callable
from pathlib import Path

import torch

from mctl.bundle_format import tensors
from mctl.bundle_format.archive import open_bundle, rewrite
from mctl.bundle_format.layout import WEIGHTS


def with_weights(bundle: Path, output: Path, change: Callable[[str, torch.Tensor], None]) -> Path:
    """A copy of the bundle after `change(name, tensor)` on each of its floating-point weights, in place."""
    with open_bundle(bundle) as archive:
        data = bytearray(archive.view(WEIGHTS))
        stored = {}
        for name, entry in tensors.read_header(data).items():
            dtype = getattr(torch, entry.dtype)
            piece = data[entry.begin : entry.end]
            tensor = torch.frombuffer(piece, dtype=dtype).reshape(entry.shape)
            if tensor.is_floating_point():
                change(name, tensor)
            stored[name] = (entry.dtype, entry.shape, bytes(piece))
        rewrite(archive, output, archive.manifest, {WEIGHTS: tensors.dump(stored)})
    return output

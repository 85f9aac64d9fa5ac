"""Every path in the archive. runner/cpp/format/layout.h holds the same table; a test compares the two.

All members lie under one top folder, as PT2 archives have it; paths here are relative to that folder.
"""

import re

MANIFEST = "extra/mctl/manifest.json"
REPORT = "extra/mctl/report.json"
WEIGHTS = "mctl/weights.safetensors"
ONNX = "mctl/program.onnx"
TOKENIZER = "mctl/tokenizer.json"
GOLDEN = "mctl/golden/"  # + <case>.safetensors
HANDLER = "mctl/handler/"  # + <file>: Python code and what it reads
LIBRARIES = "mctl/libraries/"  # + <file>.so: operators of its own that the model calls
VARIANTS = "data/aotinductor/"  # + <variant>/<file>.so
ALIGNMENT = 64  # of every member's data within the file, and of every tensor within a safetensors member

BUNDLE_SCHEMA = "mctl.bundle/1"
NEEDING_SCHEMA = "mctl.bundle/2"  # the same, with `needs`
PROGRAM_SCHEMA = "mctl.program/1"

# What a bundle may need of its reader beyond `mctl.bundle/1`, by name. A writer adds one with `manifest.needing`.
# The runner's list is shorter: what it cannot run yet, only Python does.
NEEDS: tuple[str, ...] = ("libraries", "generate", "ranges-over-dims", "handler")

# Limits of a reader, checked before anything is allocated.
MAX_MEMBERS = 1 << 16  # a program of stock torch has one member a weight
MAX_NAME = 512  # bytes of a member's name
MAX_MANIFEST = 16 << 20  # bytes
MAX_REPORT = 64 << 20  # bytes
MAX_JSON_DEPTH = 32
MAX_JSON_PARTS = 1 << 19  # objects and lists
MAX_TENSORS = 1 << 17  # tensors in one safetensors member, fillers included
MAX_TENSORS_HEADER = 16 << 20  # bytes

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def path_fault(path: str) -> str | None:
    """Why `path` cannot be a member's path; None if it can: relative, with `/` between plain names."""
    if len(path.encode(errors="surrogatepass")) > MAX_NAME:
        return f"it is longer than {MAX_NAME} bytes"
    if _CONTROL.search(path):
        return "it holds a control character"
    if "\\" in path:
        return "it holds a backslash"
    if path.startswith("/"):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it has an empty part, `.` or `..`"
    return None

"""The bill of materials of a packed folder: a CycloneDX document."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ... import __version__
from .licenses import Work

NAME = "sbom.cdx.json"
_SPACE = uuid.UUID("6f1d3f0c-6a1b-5d6e-9d0b-0d6f6e1a7c52")  # of the serial numbers: the same content has the same


@dataclass(frozen=True, slots=True)
class Component:
    """A file of the folder (`file` and `sha256`), or what is compiled into one (`inside`)."""

    kind: Literal["application", "library", "machine-learning-model"]
    work: Work
    file: str = ""
    sha256: str = ""
    inside: str = ""  # another component's file
    needs: tuple[str, ...] = ()  # files
    properties: tuple[tuple[str, str], ...] = ()

    @property
    def reference(self) -> str:
        return self.file or f"{self.inside}#{self.work.name}"


def document(
    name: str, version: str, moment: str, components: Sequence[Component], properties: Mapping[str, str]
) -> bytes:
    """CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json/). `name`: what is packed; `moment`: ISO 8601."""
    refs = {part.reference: part for part in components}
    inner = {ref: [other.reference for other in components if other.inside == ref] for ref in refs}
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": moment,
            "tools": {"components": [{"type": "application", "name": "mctl", "version": __version__}]},
            "component": {"type": "application", "bom-ref": "pack", "name": name, "version": version},
            "properties": _properties(properties.items()),
        },
        "components": [_component(part) for part in components],
        "dependencies": [
            {"ref": "pack", "dependsOn": [part.reference for part in components if part.file]},
            *({"ref": ref, "dependsOn": [*sorted(part.needs), *inner[ref]]} for ref, part in refs.items()),
        ],
    }
    serial = uuid.uuid5(_SPACE, msgspec.json.encode(body).decode())
    return msgspec.json.format(msgspec.json.encode({**body, "serialNumber": f"urn:uuid:{serial}"}), indent=2) + b"\n"


def _component(part: Component) -> dict[str, Any]:
    work = part.work
    named = part.file or work.name
    found: dict[str, Any] = {"type": part.kind, "bom-ref": part.reference, "name": named}
    if work.version:
        found["version"] = work.version
    if part.sha256:
        found["hashes"] = [{"alg": "SHA-256", "content": part.sha256}]
    if work.expression:
        found["licenses"] = [{"expression": work.expression}]
    if work.purl:
        found["purl"] = work.purl
    if work.url:
        found["externalReferences"] = [{"type": "license", "url": work.url}]
    if part.properties:
        found["properties"] = _properties(part.properties)
    return found


def _properties(pairs: Any) -> list[dict[str, str]]:
    return [{"name": f"mctl:{name}", "value": value} for name, value in pairs]

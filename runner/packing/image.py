"""A Dockerfile for a packed folder."""

import string

from ...bundle_format.dependencies import version_numbers
from ...bundle_format.errors import PackError

_BASES = (  # glibc -> an image that has it and little else: no shell, no package manager, a user without rights
    ("2.36", "gcr.io/distroless/base-nossl-debian12:nonroot"),
    ("2.41", "gcr.io/distroless/base-nossl-debian13:nonroot"),
)

_TEXT = string.Template("""\
# $model, as `mctl pack` packed it. It needs glibc $needed or newer; the base has $glibc.
#
#   docker build -t $model .
#   docker run --rm --read-only --cap-drop ALL -p 127.0.0.1:8000:8000 $model
FROM $base
COPY . /pack
USER 65532:65532
EXPOSE 8000
# The base has nothing to ask with, and orchestrators do not read it: have them probe /v2/health/ready.
HEALTHCHECK NONE
ENTRYPOINT ["/pack/mctl-runner", "serve", "/pack/model.pt2", "--host=0.0.0.0"]
""")


def dockerfile(model: str, needed: str) -> str:
    """`needed`: of glibc. PackError where no base is known that has it."""
    for glibc, base in _BASES:
        if version_numbers(needed) <= version_numbers(glibc):
            return _TEXT.substitute(model=model.lower(), needed=needed, glibc=glibc, base=base)
    hint = "pack on an older system, or leave `--dockerfile` out"
    raise PackError(f"the packed files need glibc {needed}, newer than that of the base images known here", hint)

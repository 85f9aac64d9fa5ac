"""A bundle that needs no libtorch, called as it is served: by `mctl-runner` through mctl's shim."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from safetensors.torch import load as load_tensors
from torch import Tensor

from ..bundle_format import contract as contracts
from ..bundle_format.errors import ModelError
from ..bundle_format.manifest import Manifest
from ..export import golden
from ..runner import native, values
from ..runner.stopwatch import Ask, Ended, Failed, runner_stopwatch


class StandaloneSession:
    """Calls as those of runner.session, made in a process without libtorch. How that dies, this one dies too."""

    def __init__(self, bundle: Path, manifest: Manifest, runner: Path | None = None) -> None:
        self._contract = manifest.contract
        self._runner = runner_stopwatch(runner or native.find_runner(), bundle, None, os.cpu_count() or 1)
        # without names, so that nothing is left however this process ends
        self._given, self._got = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._fresh = True

    def call(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name. ContractError, ModelError."""
        declared = {each.name: each for each in self._contract.inputs}
        tensors = {name: values.tensor_from(declared[name], tensor)[0] for name, tensor in inputs.items()}
        dims = contracts.check(self._contract, {name: values.info(declared[name], t) for name, t in tensors.items()})
        given, got = _path_of(self._given), _path_of(self._got)
        given.write_bytes(b"".join(map(bytes, golden.dump_case(golden.Case("", dims, tensors, {})))))
        ask = Ask(str(given), dims, "", 0.0, calls=1, outputs=str(got), state="" if self._fresh else "kept")
        try:
            self._runner.time(ask)
        except Ended as end:
            if end.code < 0:
                os.kill(os.getpid(), -end.code)
            raise SystemExit(end.code) from end
        except Failed as failed:
            raise ModelError(f"the model failed: {failed}") from failed
        self._fresh = False
        return {name.removeprefix("output."): tensor for name, tensor in load_tensors(got.read_bytes()).items()}

    def reset_state(self) -> None:
        self._fresh = True

    @property
    def peak(self) -> int:
        """Largest resident size of that process, bytes."""
        status = Path(f"/proc/{self._runner.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _path_of(file: IO[bytes]) -> Path:
    """By which another process opens a file that has no name."""
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")

"""Triton through pytriton: a Python function behind Triton's dynamic batcher, the v2 protocol with binary tensors."""

import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from engine import Engine, arguments
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def main() -> None:
    given = arguments()
    # Triton's Python processes load libpython by its name: that of this Python, not another of the system
    os.environ["LD_LIBRARY_PATH"] = sysconfig.get_config_var("LIBDIR")
    engines = [Engine(str(given.model), given.threads) for _ in range(given.workers)]
    config = TritonConfig(
        http_address="127.0.0.1", http_port=given.port, allow_grpc=False, allow_metrics=False, exit_timeout_secs=2
    )
    workspace = Path(tempfile.mkdtemp(dir=given.work_dir)) / "workspace"  # it makes a new one, and wants none there
    with Triton(config=config, workspace=workspace) as triton:
        triton.bind(
            model_name="model",
            infer_func=[function(engine) for engine in engines],
            inputs=[Tensor(name=name, dtype=engines[0].dtype.type, shape=(-1,)) for name in engines[0].names],
            outputs=[Tensor(name="output", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=given.max_batch_size, batcher=DynamicBatcher()),
        )
        triton.serve()


def function(engine: Engine):
    @batch
    def infer(**inputs: np.ndarray) -> list[np.ndarray]:
        return [engine.run(np.stack([inputs[name] for name in engine.names], axis=1))]

    return infer


if __name__ == "__main__":
    main()

"""BentoML: a batchable API of its service, JSON bodies, which is what its clients send."""

import os
import sys
from pathlib import Path

import bentoml
import numpy as np
from engine import Engine, arguments


@bentoml.service(workers=int(os.environ.get("WORKERS", "1")), traffic={"timeout": 60, "max_concurrency": 4096})
class Model:
    def __init__(self) -> None:
        self.engine = Engine(os.environ["MODEL"], int(os.environ["THREADS"]))

    @bentoml.api(batchable=True, max_batch_size=int(os.environ.get("MAX_BATCH_SIZE", "64")), max_latency_ms=10_000)
    def infer(self, rows: np.ndarray) -> np.ndarray:
        """`rows`: [batch, inputs, values]."""
        return self.engine.run(rows.astype(self.engine.dtype, copy=False))


def main() -> None:
    given = arguments()
    os.environ |= {"MODEL": str(given.model), "THREADS": str(given.threads), "WORKERS": str(given.workers)}
    os.environ |= {"MAX_BATCH_SIZE": str(given.max_batch_size), "BENTOML_HOME": str(given.work_dir)}
    os.environ |= {"BENTOML_DO_NOT_TRACK": "true"}
    words = [sys.executable, "-m", "bentoml", "serve", "bentoml_app:Model", "--port", str(given.port)]
    os.execv(sys.executable, [*words, "--host", "127.0.0.1", "--working-dir", str(Path(__file__).parent)])


if __name__ == "__main__":
    main()

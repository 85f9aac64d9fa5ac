"""What TorchServe's workers run; archived together with engine.py and the model."""

import os
from pathlib import Path

from engine import Engine


class Handler:
    def initialize(self, context) -> None:
        folder = Path(context.system_properties["model_dir"])
        self.engine = Engine(str(folder / context.manifest["model"]["serializedFile"]), int(os.environ["THREADS"]))

    def handle(self, data: list[dict[str, bytes]], context) -> list[bytes]:
        return self.engine.rows([bytes(row["body"]) for row in data])

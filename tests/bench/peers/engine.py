"""What all peers run: the ONNX model by onnxruntime, one call for a batch of request bodies."""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime


class Engine:
    """A body is one row: the inputs' values one after another, little-endian; an answer is the output's row.

    The inputs have one dtype and, but for the batch, one shape; bodies that run together have equal lengths.
    """

    def __init__(self, path: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = self._session.get_inputs()
        self.names = [given.name for given in inputs]
        self.dtype = np.dtype({"tensor(float)": np.float32, "tensor(int64)": np.int64}[inputs[0].type])

    def rows(self, bodies: list[bytes]) -> list[bytes]:
        stacked = np.frombuffer(b"".join(bodies), self.dtype).reshape(len(bodies), len(self.names), -1)
        return [row.tobytes() for row in self.run(stacked)]

    def run(self, stacked: np.ndarray) -> np.ndarray:
        """`stacked`: [batch, inputs, values]; gives [batch, values]."""
        values = np.ascontiguousarray(stacked.swapaxes(0, 1))
        return self._session.run(None, dict(zip(self.names, values, strict=True)))[0]


def arguments() -> argparse.Namespace:
    """What each peer is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="the ONNX file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="of onnxruntime, in each process")
    parser.add_argument("--workers", type=int, required=True, help="processes that run the model")
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--work-dir", type=Path, required=True, help="for files that the server needs")
    return parser.parse_args()

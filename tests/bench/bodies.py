"""How each server wants a request written, and how its answer is read: the fast natural way of each."""

import json
from collections.abc import Callable, Mapping

import numpy as np

Inputs = Mapping[str, np.ndarray]
Written = tuple[bytes, dict[str, str]]  # the body and its headers
Writer = Callable[[Inputs], Written]
Reader = Callable[[bytes, Mapping[str, str]], np.ndarray]  # body and lower-case headers -> flat float32

_BINARY = {"content-type": "application/octet-stream"}
_JSON = {"content-type": "application/json"}
_OIP = {"float32": "FP32", "int64": "INT64"}
_JSON_BYTES = "inference-header-content-length"


def write_bytes(inputs: Inputs) -> Written:
    """The values of all inputs one after another."""
    return b"".join(array.tobytes() for array in inputs.values()), _BINARY


def write_oip_raw(inputs: Inputs) -> Written:
    """The Open Inference Protocol for a model with one input: the body is its values."""
    [array] = inputs.values()
    return array.tobytes(), {**_BINARY, _JSON_BYTES: "0"}


def write_oip_binary(inputs: Inputs) -> Written:
    """The Open Inference Protocol with binary tensors, in both directions."""
    head = json.dumps(
        {
            "inputs": [_described(n, a, {"parameters": {"binary_data_size": a.nbytes}}) for n, a in inputs.items()],
            "parameters": {"binary_data_output": True},
        },
        separators=(",", ":"),
    ).encode()
    tensors = b"".join(array.tobytes() for array in inputs.values())
    return head + tensors, {**_BINARY, _JSON_BYTES: str(len(head))}


def write_oip_json(inputs: Inputs) -> Written:
    """The Open Inference Protocol in plain JSON."""
    tensors = []
    for name, array in inputs.items():
        numbers = ",".join(map(str, array.reshape(-1)))  # numpy's str: as few digits as tell the value
        tensors.append(json.dumps(_described(name, array, {}))[:-1] + f', "data": [{numbers}]}}')
    return f'{{"inputs": [{", ".join(tensors)}]}}'.encode(), _JSON


def write_bentoml(inputs: Inputs) -> Written:
    """Its JSON: the argument `rows`, [batch, inputs, values]."""
    rows = np.stack([array.reshape(len(array), -1) for array in inputs.values()], axis=1)
    return json.dumps({"rows": rows.tolist()}).encode(), _JSON


def read_bytes(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.frombuffer(body, np.float32)


def read_oip_binary(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.frombuffer(body[int(headers.get(_JSON_BYTES, 0)) :], np.float32)


def read_oip_json(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.concatenate([np.array(output["data"], np.float32).reshape(-1) for output in json.loads(body)["outputs"]])


def read_json(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.array(json.loads(body), np.float32).reshape(-1)


def _described(name: str, array: np.ndarray, more: Mapping[str, object]) -> dict[str, object]:
    return {"name": name, "shape": list(array.shape), "datatype": _OIP[str(array.dtype)], **more}

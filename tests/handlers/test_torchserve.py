"""TorchServe's contract: handlers as they are written for it, what they are given, and how their answers go back."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from .front import CONTRACT, started

TWO_OUTPUTS = {
    **CONTRACT,
    "inputs": [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch", 3]},
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch", 3]},
    ],
    "outputs": [
        {"name": "logits", "dtype": "float32", "shape": ["batch", 2]},
        {"name": "hidden", "dtype": "float32", "shape": ["batch", 1]},
    ],
}
LONE = {**CONTRACT, "outputs": [{"name": "output", "dtype": "float32", "shape": ["batch", 2]}]}

# A text classifier with a vocabulary file, in the way of those that come with TorchServe's examples.
TEXT = """
import json, logging, os
import torch
from ts.torch_handler.base_handler import BaseHandler

logger = logging.getLogger(__name__)

class VocabularyHandler(BaseHandler):
    def __init__(self):
        super(VocabularyHandler, self).__init__()
        self.initialized = False

    def initialize(self, ctx):
        super().initialize(ctx)
        properties = ctx.system_properties
        with open(os.path.join(properties.get("model_dir"), "vocab.json")) as f:
            self.vocab = json.load(f)

    def preprocess(self, requests):
        rows = []
        for data in requests:
            text = data.get("data")
            if text is None:
                text = data.get("body")
            if isinstance(text, (bytes, bytearray)):
                text = text.decode("utf-8")
            if isinstance(text, dict):
                text = text["text"]
            rows.append(([self.vocab.get(w, 0) for w in text.split()] + [0, 0, 0])[:3])
        ids = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return ids, (ids != 0).long()

    def inference(self, inputs):
        with torch.no_grad():
            return self.model(inputs[0], attention_mask=inputs[1])

    def postprocess(self, outputs):
        predictions = torch.argmax(outputs[0], dim=1).tolist()
        assert outputs.logits is outputs["logits"] and len(outputs) == 2
        return [self.mapping[str(p)] for p in predictions]
"""


def _text_model(call: dict[str, object], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    total = (inputs["input_ids"] * inputs["attention_mask"]).sum(1).astype(np.float32)
    return {"logits": np.stack([10 - total, total], 1), "hidden": total[:, None]}


def test_a_text_classifier_with_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text_handler.py").write_text(TEXT)
    (tmp_path / "vocab.json").write_text(json.dumps({"good": 7, "bad": 1}))
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "negative", "1": ["n1", "positive"]}))
    with started(tmp_path / "text_handler.py", _text_model, contract=TWO_OUTPUTS) as front:
        assert front.ready == {"t": "ready", "routes": [], "stream": False, "python": front.ready["python"]}
        assert front.ask(b"good day")[::2] == (200, b"positive")
        assert front.ask({"text": "bad"}, headers=[["content-type", "application/json"]])[::2] == (200, b"negative")
        form = b'--B\r\ncontent-disposition: form-data; name="data"\r\n\r\nvery good\r\n--B--\r\n'
        head = [["content-type", "multipart/form-data; boundary=B"]]
        assert front.ask(form, headers=head)[::2] == (200, b"positive")
        assert {tensor["dtype"] for call in front.calls for tensor in call["inputs"]} == {"INT64"}
        assert "warning" not in front.log
        assert front.ask({"wrong": 1}, headers=[["content-type", "application/json"]])[0] == 500
        assert "KeyError: 'text'" in front.log


# Module-level `handle` and a state of its own.
FUNCTION = """
import torch
class Counter:
    def __init__(self):
        self.initialized, self.count = False, 0
    def initialize(self, context):
        self.model, self.initialized = context.compiled_model, True

_service = Counter()

def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    _service.count += 1
    rows = torch.tensor([item["body"] for item in data], dtype=torch.float32)
    made = _service.model(rows)
    for at in range(len(data)):
        context.set_response_content_type(at, "application/x-rows")
        context.set_response_header(at, "X-Id", context.get_request_id(at))
        if context.get_request_header(at, "Fail"):
            context.set_response_status(code=507, phrase="no", idx=at)
    return [{"row": row, "of": len(data), "call": _service.count} for row in made.tolist()]
"""


def test_a_module_s_function_gathers_batches(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTION)
    head = [["content-type", "application/json"]]
    model = lambda call, inputs: {"output": inputs["x"] + 1}  # noqa: E731
    with started(tmp_path / "f.py", model, contract=LONE, batch_size=3, batch_delay_ms=60000) as front:
        for id in range(3):
            front.request(id, [id, id], headers=[*head, *([["fail", "yes"]] if id == 1 else [])])
        frames = [front.next(id) for id in range(3)]
        assert [json.loads(body) for _, body in frames] == [
            {"row": [id + 1, id + 1], "of": 3, "call": 1} for id in range(3)
        ]
        assert [header["status"] for header, _ in frames] == [200, 507, 200]
        assert dict(frames[2][0]["headers"]) == {"content-type": "application/x-rows", "x-id": "r2"}
        assert len(front.calls) == 1
        front.request(4, [4, 4], headers=head)  # one that goes away leaves no hole
        front.send({"t": "cancel", "id": 4})
        assert front.next(4)[0]["status"] == 499
        for id in range(5, 8):
            front.request(id, [id, id], headers=head)
        assert [json.loads(front.next(id)[1])["of"] for id in range(5, 8)] == [3, 3, 3]


ODD = """
import torch
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException
from ts.handler_utils.timer import timed
from ts.context import Context

class Odd(BaseHandler):
    @timed
    def handle(self, data, context: Context):
        context.metrics.add_counter("calls", 1)
        what = bytes(data[0]["body"]).decode()
        if what == "count": return [1, 2]
        if what == "type": return {"a": 1}
        if what == "predict": raise PredictionException("not like this", 513)
        if what == "tensor": return [torch.arange(3)]
        if what == "nan": return [{"a": float("nan")}]
        if what == "names": return [sorted(data[0])]
        if what == "async": return self.later()
        if what == "own": return [self.model(torch.zeros(1, 2), torch.zeros(1, 2))]
        if what == "double": return [self.model(torch.zeros(1, 2, dtype=torch.float64)).tolist()]
        return [self.model.eval().to("cpu")(torch.tensor([[1.0, 2.0]])).tolist()]
    async def later(self):
        return ["later"]
"""


def test_what_it_may_and_may_not_return(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    model = lambda call, inputs: {"output": inputs["x"] + 1}  # noqa: E731
    with started(tmp_path / "odd.py", model, contract=LONE) as front:
        assert front.ask_json(b"") == (200, [[2.0, 3.0]])
        assert front.ask_json(b"names", query="top=3") == (200, ["body", "top"])
        assert front.ask(b"async")[::2] == (200, b"later")
        assert front.ask_json(b"predict") == (513, {"error": "not like this"})
        assert front.ask_json(b"own") == (400, {"error": "the model takes 1 inputs, 2 were given"})
        assert front.ask_json(b"double") == (400, {"error": "input 'x': dtype is float64, allowed float32"})
        assert front.ask_json(b"nan")[0] == 422
        import torch

        assert torch.load(io.BytesIO(front.ask(b"tensor")[2])).tolist() == [0, 1, 2]
        for what, said in (
            ("count", "the handler returned 2 items for a batch of 1 requests"),
            ("type", "the handler returned a dict, not a list with one item a request"),
        ):
            assert front.ask(what.encode())[0] == 500
            assert said in front.log
        assert front.ask_json(b"") == (200, [[2.0, 3.0]])


IMAGES = """
from ts.torch_handler.image_classifier import ImageClassifier

class Mine(ImageClassifier):
    topk = 2
"""


def test_an_image_classifier(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "h.py").write_text(IMAGES)
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "red", "1": "green", "2": "blue"}))
    contract = {**LONE, "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 224, 224]}]}
    file = io.BytesIO()
    Image.new("RGB", (300, 500), (255, 0, 0)).save(file, "JPEG")
    with started(tmp_path / "h.py", lambda _, x: {"output": x["x"].mean((2, 3))}, contract=contract) as front:
        status, said = front.ask_json(file.getvalue())
    assert status == 200 and list(said) == ["red", "blue"]
    # the mean of a pixel that is 1 (or 0) in one channel, less ImageNet's mean, by its deviation; then softmax
    means = np.array([(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0 - 0.406) / 0.225])
    assert said["red"] == pytest.approx((np.exp(means) / np.exp(means).sum())[0], abs=0.01)


def test_one_that_brings_its_own_model_runs_with_a_warning(tmp_path: Path) -> None:
    text = (
        "class H:\n def initialize(self, context): self.model = len\n def handle(self, data, context): return ['own']\n"
    )
    (tmp_path / "h.py").write_text(text)
    with started(tmp_path / "h.py") as front:
        assert front.ask(b"")[2] == b"own"
        assert re.search("warning: the handler loads a model of its own", front.log)

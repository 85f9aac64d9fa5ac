"""The samples' handlers in real handler processes; the models are functions whose answers can be counted by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ..handlers.front import started

SAMPLES = Path(__file__).parents[2] / "samples" / "handlers"
WORDS = ["good", "bad", "film", "cats", "dogs", "like", "sleep", "rain", "falls"]
TEXT = {
    "dims": [{"name": "batch", "min": 1, "max": 8}, {"name": "seq", "min": 1, "max": 16}],
    "inputs": [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch", "seq"]},
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch", "seq"]},
    ],
    "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 2]}],
    "batch_dim": "batch",
}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each word is a token: the first one is 1, what is unknown 0; a query and a document have a 10 between them."""
    folder = tmp_path_factory.mktemp("assets")
    known = {"[UNK]": 0, **{word: at for at, word in enumerate(WORDS, 1)}, "[SEP]": 10}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A [SEP] $B:1", special_tokens=[("[SEP]", 10)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "documents.txt").write_text("cats sleep\ndogs like rain\nrain falls\n")
    (folder / "vocabulary.json").write_text(json.dumps(known))
    (folder / "index_to_name.json").write_text(json.dumps({"0": "negative", "1": "positive"}))
    return folder


def feeling(call: dict[str, Any], inputs: Arrays) -> Arrays:
    """How often "bad" (2) and "good" (1) are there."""
    ids = inputs["input_ids"]
    return {"logits": np.stack([(ids == 2).sum(1), (ids == 1).sum(1)], 1).astype(np.float32)}


def test_sentiment(assets: Path) -> None:
    with started(SAMPLES / "sentiment.py", feeling, contract=TEXT, assets=str(assets)) as front:
        status, said = front.ask_json({"text": "good good film"})
        assert (status, said["label"]) == (200, "positive")
        assert said["score"] == pytest.approx(np.exp(2) / (1 + np.exp(2)))
        assert front.ask_json({"text": "bad film"}, path="/classify")[1]["label"] == "negative"
        assert front.ask_json({"text": 5}) == (400, {"error": 'send `{"text": "…"}`'})


def test_search_with_two_models(assets: Path) -> None:
    def both(call: dict[str, Any], inputs: Arrays) -> Arrays:
        ids = inputs["input_ids"][0]
        if not call["model"]:  # a vector with a place for each word
            return {"embedding": np.bincount(ids, minlength=11)[None].astype(np.float32)}
        first = inputs["token_type_ids"][0] == 0
        query, document = set(ids[first]) - {10}, ids[~first]
        return {"logits": np.array([[sum(word in query for word in document) / len(document)]], np.float32)}

    with started(SAMPLES / "search.py", both, contract=TEXT, assets=str(assets)) as front:
        status, said = front.ask_json({"query": "rain falls"})
        assert status == 200 and [each["document"] for each in said] == ["rain falls", "dogs like rain", "cats sleep"]
        assert [each["score"] for each in said] == pytest.approx([1, 1 / 3, 0])
        assert {call["model"] for call in front.calls} == {"", "reranker"}
        before = len(front.calls)
        front.ask_json({"query": "cats"})
        assert len(front.calls) - before == 4  # the documents' vectors are kept


def test_a_torchserve_handler(assets: Path) -> None:
    contract = {**TEXT, "inputs": TEXT["inputs"][:1]}
    contract["outputs"] = [{"name": "output", "dtype": "float32", "shape": ["batch", 2]}]

    def model(call: dict[str, Any], inputs: Arrays) -> Arrays:
        return {"output": feeling(call, inputs)["logits"]}

    with started(SAMPLES / "torchserve_words.py", model, contract=contract, assets=str(assets)) as front:
        assert front.ask_json(b"A GOOD film") == (200, {"label": "positive"})
        assert front.ask_json(b"bad", headers=[["content-type", "text/plain"]]) == (200, {"label": "negative"})


def test_a_streaming_answer(assets: Path) -> None:
    with started(SAMPLES / "lines.py", feeling, contract=TEXT, assets=str(assets)) as front:
        front.request(1, b"good film\n\nbad bad\n", path="/lines", headers=[["content-type", "text/plain"]])
        parts = [json.loads(body.removeprefix(b"data: ")) for head, body in front.stream(1) if head["t"] == "part"]
    assert parts == [{"line": 1, "class": 1}, {"line": 3, "class": 0}]

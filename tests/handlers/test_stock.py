"""mctl's own handlers beside the libraries' own pipelines, on 200 inputs: the same labels, scores within tolerance."""

import asyncio
import base64
import io
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mctl.bundle_format.contract import Contract, Dim, Input, Output
from mctl.bundle_format.errors import HandlerError, MctlError
from mctl.export.source import eager, load_source
from mctl.handlers import Request
from mctl.handlers.local import LocalCaller, answer_locally, load_local

from . import folders

Ask = Callable[..., tuple[int, Any]]
COUNT = 200


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models: others would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def asker(folder: Path, task: str, assets: Path) -> Ask:
    """What answers requests as the handler of this folder's bundle would, with the eager model."""
    source = load_source(f"{folder}:{task}")
    assert source.handler is not None
    assets.mkdir()
    for name, data in source.handler.members:
        (assets / Path(name).name).write_bytes(bytes(data))  # type: ignore[arg-type]
    axes: dict[str, dict[int, str]] = {}
    for spec in source.dims:
        for name, axis in spec.bindings:
            axes.setdefault(name, {})[axis] = spec.name
    run = eager(source)
    outputs = run(source.kwargs)
    contract = Contract(
        dims=tuple(Dim(name=spec.name, min=spec.min, max=spec.max) for spec in source.dims),
        inputs=tuple(
            Input(
                name=name,
                dtype=str(value.dtype).removeprefix("torch."),  # type: ignore[arg-type]
                shape=tuple(axes[name].get(axis, size) for axis, size in enumerate(value.shape)),
                pad=source.pads.get(name),
            )
            for name, value in source.kwargs.items()
        ),
        outputs=tuple(
            Output(name=name, dtype="float32", shape=("batch", *value.shape[1:])) for name, value in outputs.items()
        ),
        batch_dim="batch",
    )
    caller = LocalCaller("m", "1", contract, run)
    application = load_local(f"stock:{task}", assets, caller)

    def ask(body: object, path: str = "/predictions/m", kind: str = "application/json", query: str = "") -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        options = dict(pair.split("=") for pair in query.split("&") if pair)
        request = Request("POST", path, data, headers={"content-type": kind}, query=options, id="1")
        answer = asyncio.run(answer_locally(application, request, caller))
        return answer.status, json.loads(bytes(answer.body))

    return ask


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ask]:
    folder = tmp_path_factory.mktemp("text")
    return folder, asker(folders.text_folder(folder, "text-classification"), "text-classification", folder / "assets")


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ask]:
    folder = tmp_path_factory.mktemp("tokens")
    return folder, asker(folders.text_folder(folder, "token-classification"), "token-classification", folder / "assets")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ask]:
    folder = folders.sentence_folder(tmp_path_factory.mktemp("sentences"))
    return folder, asker(folder, "text-embedding", folder / "assets")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ask]:
    folder = tmp_path_factory.mktemp("images")
    return folder, asker(folders.image_folder(folder), "image-classification", folder / "assets")


def _close(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [{**each, "score": 0} for each in got] == [{**each, "score": 0} for each in wanted]
    assert np.allclose([each["score"] for each in got], [each["score"] for each in wanted], atol=1e-5)


def test_text_classification_beside_the_pipeline(classifier: tuple[Path, Ask]) -> None:
    from transformers import pipeline

    folder, ask = classifier
    texts = folders.sentences(COUNT, seed=5)
    known = pipeline("text-classification", str(folder), device="cpu")
    status, said = ask({"text": texts, "top": 3})
    assert status == 200 and len({each[0]["label"] for each in said}) == 3, "every label comes first somewhere"
    for got, wanted in zip(said, known(texts, top_k=None, batch_size=50), strict=True):
        _close(got, wanted)
    pairs = [{"text": "a cat", "text_pair": "the big dog"}]
    _close(ask({**pairs[0], "top_k": None})[1], known(pairs, top_k=None)[0])


def test_token_classification_beside_the_pipeline(tagger: tuple[Path, Ask]) -> None:
    from transformers import pipeline

    folder, ask = tagger
    texts = folders.sentences(COUNT, seed=6)
    known = pipeline("token-classification", str(folder), device="cpu")
    for strategy in ("none", "simple"):
        status, said = ask({"inputs": texts, "parameters": {"aggregation_strategy": strategy}})
        assert status == 200 and sum(map(len, said)) > COUNT
        for got, wanted in zip(said, known(texts, aggregation_strategy=strategy, batch_size=50), strict=True):
            _close(got, wanted)


def test_text_embedding_beside_sentence_transformers(embedder: tuple[Path, Ask]) -> None:
    from sentence_transformers import SentenceTransformer

    folder, ask = embedder
    texts = folders.sentences(COUNT, seed=7, longest=30)
    status, said = ask({"text": texts, "truncate": True})
    wanted = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert status == 200 and np.allclose(said, wanted, atol=1e-5)


BOTH = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", lambda tokens: tokens[0]),
        ("max", lambda tokens: tokens.max(0)),
        ("mean_sqrt_len_tokens", lambda tokens: tokens.sum(0) / len(tokens) ** 0.5),
        (BOTH, lambda tokens: np.concatenate([tokens[0], tokens.mean(0)])),
    ],
)  # fmt: skip
def test_ways_to_pool(tmp_path: Path, pooling: object, expected: Callable[[np.ndarray], np.ndarray]) -> None:
    """By hand: the vectors of the tokens come from transformers."""
    from transformers import BertModel

    folder = folders.sentence_folder(tmp_path / "f", pooling, normalize=False)
    ids = folders.tokenizer()("the big cat", return_tensors="pt")["input_ids"]
    tokens = BertModel.from_pretrained(folder)(ids).last_hidden_state[0].detach().numpy()
    said = asker(folder, "text-embedding", tmp_path / "assets")({"text": "the big cat"})[1]
    assert np.allclose(said, expected(tokens), atol=1e-5)


def test_image_classification_beside_the_pipeline(images: tuple[Path, Ask]) -> None:
    from transformers import AutoModelForImageClassification, ViTImageProcessorPil

    folder, ask = images
    draw = np.random.default_rng(3)
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = ViTImageProcessorPil.from_pretrained(folder)
    files = []
    for at in range(COUNT):
        height, width = draw.integers(10, 60, 2)
        small = Image.fromarray(draw.integers(0, 255, (3, 3, 3), np.uint8))
        file = io.BytesIO()
        small.resize((int(width), int(height))).save(file, ("PNG", "JPEG")[at % 2])
        files.append(file)
    with torch.no_grad():
        logits = model(**processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")).logits
    firsts = set()
    for file, scores in zip(files, logits.softmax(1), strict=True):
        status, said = ask(file.getvalue(), kind="image/png", query="top=4")
        order = scores.argsort(descending=True).tolist()
        wanted = [{"label": model.config.id2label[index], "score": float(scores[index])} for index in order]
        assert status == 200
        _close(said, wanted)
        firsts.add(said[0]["label"])
    assert len(firsts) > 1


# --- what clients may send ---------------------------------------------------------------------------------------


def test_embeddings_as_openais_clients_ask(embedder: tuple[Path, Ask]) -> None:
    _, ask = embedder
    texts = ["the cat sits", "a dog", "the cat sits"]
    status, said = ask({"input": texts, "model": "any"}, "/v1/embeddings")
    assert status == 200 and said["object"] == "list" and said["model"] == "any"
    assert [each["index"] for each in said["data"]] == [0, 1, 2] and said["data"][0]["object"] == "embedding"
    assert said["usage"] == {"prompt_tokens": 14, "total_tokens": 14}  # with [CLS] and [SEP]
    vectors = [each["embedding"] for each in said["data"]]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) and vectors[0] == vectors[2] != vectors[1]
    alone = ask({"input": texts[1], "encoding_format": "base64"}, "/v1/embeddings")[1]["data"][0]["embedding"]
    assert np.allclose(struct.unpack("<32f", base64.b64decode(alone)), vectors[1], atol=1e-6)
    assert ask({"text": texts[1]})[1] == pytest.approx(vectors[1], abs=1e-6)


def test_embeddings_of_tokens(embedder: tuple[Path, Ask]) -> None:
    _, ask = embedder
    ids = [folders.tokenizer()(text)["input_ids"] for text in ("the cat sits", "a dog")]
    wanted = ask({"input": ["the cat sits", "a dog"]}, "/v1/embeddings")[1]
    assert ask({"input": ids}, "/v1/embeddings")[1] == wanted
    assert ask({"input": ids[0]}, "/v1/embeddings")[1]["data"] == wanted["data"][:1]


LONG = " ".join(["cat"] * 30)
TOO_LONG = "the model takes 16: shorten it, or send `truncate: true`"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "`input` has to be a text, tokens, or a list of these"),
        ({"input": []}, "input", "`input` has to be a text, tokens, or a list of these"),
        ({"input": [1, "a"]}, "input", "`input` has to be a text, tokens, or a list of these"),
        ({"input": [True]}, "input", "`input` has to be a text, tokens, or a list of these"),
        ({"input": ["a", ""]}, "input", "`input` holds an empty text"),
        ({"input": ["a"] * 2049}, "input", "`input` has 2049 entries, allowed 2048"),
        ({"input": [5000]}, "input", "token 5000 is not in the vocabulary of 117"),
        ({"input": [-1]}, "input", "token -1 is not in the vocabulary of 117"),
        ({"input": "a", "dimensions": 16}, "dimensions", "`dimensions` has to be 32: the model has no other"),
        ({"input": "a", "encoding_format": 1}, "encoding_format", "`encoding_format` has to be `float` or `base64`"),
        ({"input": "a", "truncate": 1}, "truncate", "`truncate` has to be true or false"),
        ({"input": LONG}, "input", f"the text has 32 tokens, {TOO_LONG}"),
        ({"input": ["a", LONG]}, "input", f"text 1 has 32 tokens, {TOO_LONG}"),
        ({"input": [7] * 17}, "input", f"the text has 17 tokens, {TOO_LONG}"),
        ([], None, "the body is no JSON object"),
        (b"{", None, "the body is no JSON: Input data was truncated"),
    ],
)  # fmt: skip
def test_what_openais_clients_are_told(embedder: tuple[Path, Ask], body: object, param: str | None, said: str) -> None:
    status, answer = embedder[1](body, "/v1/embeddings")
    error = answer["error"]
    assert (status, error["message"], error["param"]) == (400, said, param)
    assert error["type"] == "invalid_request_error" and error.keys() == {"message", "type", "param", "code"}


def test_long_texts_are_cut_if_that_is_asked(embedder: tuple[Path, Ask]) -> None:
    _, ask = embedder
    cut = ask({"input": LONG, "truncate": True}, "/v1/embeddings")[1]
    assert cut["usage"]["prompt_tokens"] == 16
    assert cut["data"] == ask({"input": " ".join(["cat"] * 14)}, "/v1/embeddings")[1]["data"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": 5}, "`text` has to be a text, or a list of texts"),
        ({"inputs": []}, "`inputs` has to be a text, or a list of texts"),
        ("a", 'the body is no object: send `{"text": "…"}`'),
        ({"text": "a", "top": 0}, "`top` is `0`, allowed a whole number from 1"),
        ({"text": "a", "top": "many"}, "`top` is `many`, allowed a whole number from 1"),
        ({"text": "a", "top": True}, "`top` is `True`, allowed a whole number from 1"),
        ({"text": "a", "text_pair": ["b"] * 2}, "`text_pair` has to be like `text`: one for each"),
        (
            {"text": " ".join(["cat"] * 60)},
            "the text has 62 tokens, the model takes 40: shorten it, or send `truncate: true`",
        ),
    ],
)
def test_what_other_clients_are_told(classifier: tuple[Path, Ask], body: object, said: str) -> None:
    assert classifier[1](body) == (400, {"error": said})


def test_plain_text_is_a_text_too(classifier: tuple[Path, Ask]) -> None:
    _, ask = classifier
    assert ask(b"the cat", kind="text/plain; charset=utf-8", query="top=2") == ask({"text": "the cat", "top": 2})
    assert len(ask(b"the cat", kind="text/plain", query="top=1")[1]) == 1


def test_many_texts_at_once(classifier: tuple[Path, Ask]) -> None:
    _, ask = classifier
    texts = folders.sentences(1000, seed=9)  # enough to be tokenized elsewhere
    _close(ask({"text": texts, "top": 1})[1][-1], ask({"text": texts[-1], "top": 1})[1])


def test_images_come_in_several_ways(images: tuple[Path, Ask]) -> None:
    _, ask = images
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 255
    Image.fromarray(pixels).save(file, "JPEG", exif=exif, quality=100)
    upright = io.BytesIO()
    Image.fromarray(np.rot90(pixels, -1)).save(upright, "PNG")
    wanted = ask(upright.getvalue(), kind="image/png")[1]
    text = base64.b64encode(upright.getvalue()).decode()
    assert ask({"image": text})[1] == ask({"image": f"data:image/png;base64,{text}"})[1] == wanted
    form = b'--B\r\ncontent-disposition: form-data; name="x"\r\n\r\n' + upright.getvalue() + b"\r\n--B--\r\n"
    assert ask(form, kind="multipart/form-data; boundary=B")[1] == wanted
    turned = ask(file.getvalue(), kind="image/jpeg")[1]
    assert [each["label"] for each in turned] == [each["label"] for each in wanted]
    assert np.allclose([each["score"] for each in turned], [each["score"] for each in wanted], atol=0.05)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"no image", "image/png", "the body is no image that can be read"),
        (b"", "image/png", "the body is no image that can be read"),
        ({"image": "%%"}, "application/json", "`image` is no base64"),
        ({"picture": ""}, "application/json", "the JSON body has no `image`: send the file itself, or its base64"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "image/png", "the body is no image that can be read"),
    ],
)
def test_what_is_no_image(images: tuple[Path, Ask], body: object, kind: str, said: str) -> None:
    assert images[1](body, kind=kind) == (400, {"error": said})


def test_half_an_image(images: tuple[Path, Ask]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (400, 400), (9, 9, 9)).save(file, "JPEG")
    status, said = images[1](file.getvalue()[:-700], kind="image/jpeg")
    assert status == 400 and said["error"].startswith("the image cannot be read: ")


# --- folders that cannot be used ---------------------------------------------------------------------------------


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(MctlError, match=r"has no `config.json`"):
        load_source(f"{tmp_path}:text-embedding")
    plain = folders.text_folder(tmp_path / "plain", "text-embedding")
    with pytest.raises(MctlError, match=r"`plain` has no weights for `classifier.*`: it was not trained for text"):
        load_source(f"{plain}:text-classification")
    (plain / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.Dense", "path": "2_Dense"}]')
    with pytest.raises(MctlError, match="`plain` has a module `Dense` of sentence-transformers"):
        load_source(f"{plain}:text-embedding")
    (plain / "modules.json").write_text("{")
    with pytest.raises(MctlError, match=r"modules.json` is no sound JSON"):
        load_source(f"{plain}:text-embedding")


def test_handlers_whose_files_do_not_fit(tmp_path: Path, classifier: tuple[Path, Ask]) -> None:
    contract = Contract(
        dims=(Dim(name="batch", min=1, max=4),),
        inputs=(Input(name="input_ids", dtype="int64", shape=("batch", 8)),),
        outputs=(Output(name="logits", dtype="float32", shape=("batch", 2)),),
    )
    caller = LocalCaller("m", "1", contract, dict)
    with pytest.raises(HandlerError, match=r"the handler has no `tokenizer.json`"):
        load_local("stock:text-classification", tmp_path, caller)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HandlerError, match=r"`tokenizer.json` cannot be read"):
        load_local("stock:text-classification", tmp_path, caller)
    (tmp_path / "task.json").write_text('{"labels": 5}')
    with pytest.raises(HandlerError, match=r"`task.json` of the handler is not valid"):
        load_local("stock:text-classification", tmp_path, caller)
    other = Contract(dims=(), inputs=(Input(name="x", dtype="float32", shape=(1,)),), outputs=contract.outputs)
    (tmp_path / "task.json").unlink()
    with pytest.raises(HandlerError, match="the model takes x, not what a tokenizer makes"):
        load_local("stock:text-classification", tmp_path, LocalCaller("m", "1", other, dict))

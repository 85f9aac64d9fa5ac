"""`--token-file`: who may use the server, and what it says about that when it starts."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server, infer_json
from .test_batching import random

INFER = "/v2/models/mlp/infer"
TOKEN = "s3cret-T0ken+/="


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\r\nonly the first line counts\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def protected(mlp_bundle: Path, token_file: Path) -> Iterator[Server]:
    with Server(mlp_bundle, "--null", "--token-file", str(token_file), ready=False) as server:
        yield server


def test_the_right_token_opens_everything(protected: Server) -> None:
    body = json.dumps(infer_json(x=random(1))).encode()
    for field in (f"Bearer {TOKEN}", f"bearer   {TOKEN}"):
        assert protected.request(INFER, body, {"Authorization": field}).status == 200
        for path in ("/", "/v2", "/metrics", "/v2/models/mlp", "/v2/models/mlp/stats"):
            assert protected.request(path, headers={"Authorization": field}).status == 200, path


def test_all_other_tokens_are_401(protected: Server) -> None:
    body = json.dumps(infer_json(x=random(1))).encode()
    wrong = [TOKEN[:-1], TOKEN + "x", TOKEN.swapcase(), "", TOKEN[::-1], TOKEN * 1000, "only the first line counts"]
    for field in [None, TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", *(f"Bearer {token}" for token in wrong)]:
        headers = {} if field is None else {"Authorization": field}
        answer = protected.request(INFER, body, headers)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), field
        assert answer.json().keys() == {"error"} and TOKEN not in answer.error
    for path in ("/", "/v2", "/metrics", "/v2/models/mlp/ready", "/no/such/path", "/v2/health/../models/mlp"):
        assert protected.request(path).status == 401, path
    rejected = protected.request("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).body.decode()
    assert 'code="invalid"} 11\n' in rejected


def test_probes_need_no_token(protected: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/health/ready/"):
        assert protected.request(path).status == 200


def test_a_large_body_is_refused_before_it_is_sent(protected: Server) -> None:
    for framing in ("Content-Length: 60000000", "Transfer-Encoding: chunked"):
        with protected.connect() as raw:
            answer = raw.send(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n").read()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
    with protected.connect() as raw:  # a small one is read, and the connection goes on
        request = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
        assert [raw.send(request).read().status for _ in range(2)] == [401, 401]


def test_the_front_page_shows_how_to_send_it(protected: Server) -> None:
    command = protected.request("/", headers={"Authorization": f"Bearer {TOKEN}"}).body.decode().splitlines()[-1]
    assert TOKEN not in command
    done = subprocess.run(
        ["bash", "-c", command + " -sf"], capture_output=True, check=True, env=os.environ | {"TOKEN": TOKEN}
    )
    assert json.loads(done.stdout)["outputs"][0]["shape"] == [1, 10]


def test_what_is_said_at_start(mlp_bundle: Path, token_file: Path, tmp_path: Path) -> None:
    exposed = tmp_path / "exposed"
    exposed.write_text(TOKEN)
    exposed.chmod(0o644)
    token, outside = ["--token-file", str(token_file)], ["--host", "0.0.0.0"]
    for options, warnings in (
        ([], []),
        (token, []),
        (outside, ["warning: everyone who can reach this address can use the server"]),
        (
            [*outside, *token],
            ["warning: this address is protected by a token, but not encrypted: put TLS in front of it"],
        ),
        (["--token-file", str(exposed)], [f"warning: everyone on this machine can read `{exposed}`"]),
    ):
        with Server(mlp_bundle, "--null", *options, ready=False) as server:
            pass
        assert [line for line in server.lines if line.startswith("warning")] == warnings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "has no token in its first line"),
        ("\nsecond\n", "has no token in its first line"),
        ("two words\n", "has a first line that is no token"),
        ("umlaut-ü\n", "has a first line that is no token"),
    ],
)
def test_files_without_a_token(mlp_bundle: Path, tmp_path: Path, refusal, content: str | None, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    code, text = refusal(mlp_bundle, "--token-file", str(path))
    assert code == 2 and f"`--token-file`: `{path}` {message}" in text

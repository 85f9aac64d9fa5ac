"""What an operator asks of a running server: changes of its state, and how it stands."""

import http.client
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from ..bundle_format.errors import ServeError, UsageError, printable
from .scrape import Address

Json = dict[str, Any]
WAITING = ("loading", "not in memory")  # phases of a version that may still come


@dataclass(frozen=True, slots=True)
class Operator:
    """Talks to a management port. ServeError: nobody answers, or what the server says against it."""

    address: Address
    token: str | None = None
    timeout: float = 60.0

    def state(self) -> Json:
        """What is desired: the document `mctl.state/1`."""
        return self._ask("GET", "/admin/v1/state")

    def models(self) -> Json:
        """By name: versions with their phase, share of the traffic and workers."""
        models: Json = self._ask("GET", "/admin/v1/models")["models"]
        return models

    def change(self, patch: Json) -> Json:
        """The state after a merge patch of it."""
        return self._ask("PATCH", "/admin/v1/state", patch)

    def change_model(self, model: str, patch: Json | None) -> Json:
        return self.change({"models": {model: patch}})

    def roll_back(self, model: str) -> Json:
        """The model's state, with all requests back at the version before."""
        return self._ask("POST", f"/admin/v1/models/{quote(model, safe='')}/rollback", {})

    def events(self, after: int) -> list[Json]:
        """Those that came after the one with this id, as far as they are kept."""
        events: list[Json] = self._ask("GET", f"/admin/v1/events?after={after}")["events"]
        return events

    def wait_for(self, model: str, version: str, seconds: float) -> Json:
        """A version as it is listed once it is ready. ServeError with the reason if it cannot be loaded."""
        end = time.monotonic() + seconds
        while True:
            found: Json = self.models().get(model, {}).get("versions", {}).get(version, {"phase": "gone"})
            if found["phase"] == "ready" and "why" not in found:
                return found
            if found["phase"] not in (*WAITING, "ready"):
                raise ServeError(f"version `{version}` of `{model}` is not served: {found.get('why', found['phase'])}")
            if time.monotonic() > end:
                raise ServeError(f"version `{version}` of `{model}` is not ready after {seconds:g} s: {found['phase']}")
            time.sleep(0.1)

    def _ask(self, verb: str, path: str, body: Json | None = None) -> Json:
        kind = http.client.HTTPSConnection if self.address.secure else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=self.timeout)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            sent = None if body is None else msgspec.json.encode(body)
            connection.request(verb, self.address.path + path, body=sent, headers=headers)
            answer = connection.getresponse()
            return self._read(answer.status, answer.read())
        except TimeoutError:
            raise ServeError(f"`{self.address.url}` does not answer within {self.timeout:g} s") from None
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ServeError(
                f"cannot reach `{self.address.url}`: {why}", "name the address that `mctl serve --admin-port` prints"
            ) from None
        except http.client.HTTPException:
            raise ServeError(f"`{self.address.url}` answers, but does not speak HTTP") from None
        finally:
            connection.close()

    def _read(self, status: int, body: bytes) -> Json:
        try:
            told = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            told = None
        if not isinstance(told, dict):
            raise ServeError(f"`{self.address.url}` answers, but it is no management port of mctl")
        if status == 401:
            raise ServeError(f"`{self.address.url}` wants another bearer token", "name its file with `--token-file`")
        if status != 200:
            raise ServeError(printable(str(told.get("error", f"the server answers with {status}"))))
        return told


def traffic_from(words: Sequence[str]) -> dict[str, int]:
    """`stable=95 canary=5`. UsageError for anything else."""
    shares = {}
    for word in words:
        name, equals, percent = word.partition("=")
        if not equals or not percent.isdecimal():
            raise UsageError(f"`{word}` is no share", "write a label or version and its percent: `stable=95 canary=5`")
        shares[name] = int(percent)
    return shares


def replaced(before: Mapping[str, object], now: Mapping[str, object]) -> Json:
    """The merge patch that leaves exactly `now`."""
    return {**dict.fromkeys(before), **now}


def gates_from(words: Sequence[str]) -> dict[str, float]:
    """`errors=0.1%`, `p99=1.2x`. UsageError for anything else."""
    gates = {}
    for word in words:
        name, _, limit = word.partition("=")
        mark, scale = ("x", 1.0) if name == "p99" else ("%", 0.01)
        try:
            gates[name] = round(float(limit.removesuffix(mark)) * (scale if limit.endswith(mark) else 1.0), 12)
        except ValueError:
            raise UsageError(f"`{word}` is no gate", "write `errors=0.1%`, `p99=1.2x` or `mismatch=0.1%`") from None
    return gates

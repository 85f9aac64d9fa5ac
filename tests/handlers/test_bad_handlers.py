"""Bad handlers: what each does wrong is its own answer's error, and the client beside it gets its numbers."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mctl.bundle_format.contract import Contract
from mctl.bundle_format.errors import HandlerError
from mctl.handlers import Context
from mctl.handlers.loading import load_application

from .front import CONTRACT, Front, started

BAD = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
import numpy as np
from mctl.handlers import Response, route

class Weird(Exception):
    def __str__(self):
        raise ValueError("even this")

class Bad:
    def __init__(self, context):
        self.kept = []

    @route("POST", "/double")
    async def double(self, request, model):
        return {"y": (await model(x=(await request.json())["x"]))["y"]}

    @route("POST", "/bad/{what}")
    async def bad(self, request, model, models):
        what = request.parameters["what"]
        return await getattr(self, f"do_{what}")(request, model, models)

    @route("POST", "/plain/{what}")
    def plain(self, request, model, models):
        what = request.parameters["what"]
        if what == "raise": raise ValueError("plain")
        if what == "exit": sys.exit(4)
        if what == "stop": raise StopIteration
        if what == "keyboard": raise KeyboardInterrupt
        if what == "cancelled": raise asyncio.CancelledError
        if what == "thread": threading.Thread(target=lambda: 1 / 0).start()
        if what == "awaits": return model(x=[[1.0, 2.0]]).__await__()
        if what == "dtype": return model(x=np.zeros((1, 2), np.int32))
        return {}

    async def do_assertion(self, *_): assert False, "no"
    async def do_group(self, *_): raise ExceptionGroup("several", [ValueError(1), KeyError(2)])
    async def do_exit(self, *_): sys.exit(3)
    async def do_keyboard(self, *_): raise KeyboardInterrupt
    async def do_generator_exit(self, *_): raise GeneratorExit
    async def do_stop(self, *_): raise StopAsyncIteration
    async def do_weird(self, *_): raise Weird
    async def do_recursion(self, *_): return await self.do_recursion()
    async def do_nested(self, *_):
        made = []
        for _ in range(100000): made = [made]
        return made
    async def do_cyclic(self, *_):
        made = {}
        made["self"] = made
        return made
    async def do_nothing(self, *_): pass
    async def do_type(self, *_): return object
    async def do_coroutine(self, *_): return self.do_nothing()
    async def do_complex(self, *_): return {"a": 1j}
    async def do_key(self, *_): return {(1, 2): 3}
    async def do_surrogate(self, *_): return {"a": "\\ud800"}
    async def do_nan(self, *_): return {"a": float("nan")}
    async def do_nan_array(self, *_): return {"a": np.array([[1, np.inf]], np.float16)}
    async def do_objects(self, *_): return np.array([object()])
    async def do_huge(self, *_): return bytearray(2 << 30)
    async def do_status(self, *_): return Response(7)
    async def do_status_text(self, *_): return Response("200")
    async def do_header(self, *_): return Response(200, 5, b"")
    async def do_dtype(self, request, model, models): return await model(x=np.zeros((1, 2), np.float64))
    async def do_strings(self, request, model, models): return await model(x=[["a", "b"]])
    async def do_unknown(self, request, model, models): return await model(z=[[1.0, 2.0]])
    async def do_missing(self, request, model, models): return await model()
    async def do_position(self, request, model, models): return await model([[1.0, 2.0]])
    async def do_nobody(self, request, model, models): return await model(x=None)
    async def do_another(self, request, model, models): return await models["gone"](x=[[1.0]])
    async def do_index(self, request, model, models): return (await model(x=[[1.0, 2.0]]))["z"]
    async def do_not_awaited(self, request, model, models): return {"y": model(x=[[1.0, 2.0]])}
    async def do_unread(self, request, model, models):
        task = asyncio.create_task(model.call({"x": [[1.0, 2.0]]}))
        task.cancel()
        await task
    async def do_task(self, *_):
        async def fail(): raise ValueError("nobody awaits this")
        self.kept.append(asyncio.create_task(fail()))
        return {}
    async def do_cancel_self(self, *_):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    async def do_timeout(self, *_): raise TimeoutError("of my own")
    async def do_fork(self, *_):
        if (child := os.fork()) == 0:
            return {"i am": "the child"}
        os.waitpid(child, 0)
        return {"child": "ended"}
    async def do_fork_exit(self, *_):
        if (child := os.fork()) == 0:
            os._exit(0)
        return {"status": os.waitpid(child, 0)[1]}
    async def do_descriptors(self, *_):
        self.kept += [open("/dev/null") for _ in range(200)]
        return {}
    async def do_stdout(self, *_):
        print("x" * 100000)
        os.write(1, b"\\xff\\x00no text\\n")
        return {}
    async def do_closes_stdout(self, *_):
        sys.stdout.close()
        sys.stdout = None
        return {}
    async def do_closes_stderr(self, *_):
        kept, sys.stderr = sys.stderr, open(os.devnull, "w")
        sys.stderr.close()
        asyncio.get_running_loop().call_later(1, setattr, sys, "stderr", kept)
        raise ValueError("told to nobody")
    async def do_signal(self, *_):
        os.kill(os.getpid(), signal.SIGINT)
        return {}
    async def do_chdir(self, *_):
        os.chdir("/")
        os.environ.clear()
        return {}
    async def do_swallows(self, *_):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return {"cancelled": "and went on"}
    async def do_blocks(self, *_):
        self.block()
        return {}
    def block(self):
        while not os.path.exists(self.gate): time.sleep(0.01)
    async def do_gate(self, request, *_):
        Bad.gate = request.body.decode()
        return {}
    async def do_leave(self, *_): os._exit(9)
    async def do_segfault(self, *_): ctypes.string_at(0)
    async def do_abort(self, *_): os.abort()
    async def do_kill(self, *_): os.kill(os.getpid(), signal.SIGKILL)
"""

FAILED = {"error": "the handler failed on request r5: the log says why"}


@pytest.fixture(scope="module")
def bad_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "bad.py"
    path.write_text(BAD)
    return path


@pytest.fixture(scope="module")
def bad(bad_file: Path) -> Iterator[Front]:
    with started(bad_file, lambda call, x: (404, "no such model") if call["model"] else {"y": x["x"] * 2}) as front:
        assert front.ready["t"] == "ready", front.ready
        yield front


def serves(front: Front) -> bool:
    """Somebody else's request is answered, with the right numbers."""
    return front.ask_json({"x": [[1, 2]]}, id=99, path="/double") == (200, {"y": [[2.0, 4.0]]})


@pytest.mark.parametrize(
    ("what", "logged"),
    [
        ("assertion", "AssertionError: no"),
        ("group", "ExceptionGroup: several"),
        ("exit", "SystemExit: 3"),
        ("keyboard", "KeyboardInterrupt"),
        ("generator_exit", "GeneratorExit"),
        ("stop", "StopAsyncIteration"),
        ("weird", "Weird: <exception str() failed>"),
        ("recursion", "RecursionError"),
        ("nested", "RecursionError"),
        ("cyclic", "RecursionError"),
        ("nothing", "the handler returned nothing"),
        ("type", "the handler returned a type"),
        ("coroutine", "the handler returned a coroutine"),
        ("complex", "the handler returned a complex"),
        ("key", "TypeError"),
        ("surrogate", "UnicodeEncodeError"),
        ("objects", "the handler returned a object"),
        ("huge", "the answer has 2147483648 bytes, allowed 1073741824"),
        ("status", "the status of a Response is 7"),
        ("status_text", "the status of a Response is '200'"),
        ("header", "TypeError: 'int' object is not iterable"),
        ("position", "TypeError"),
        ("index", "KeyError: 'z'"),
        ("not_awaited", "the handler returned a coroutine"),
        ("timeout", "TimeoutError: of my own"),
    ],
)
def test_its_fault_is_its_own(bad: Front, what: str, logged: str) -> None:
    assert bad.ask_json(id=5, path=f"/bad/{what}") == (500, FAILED)
    assert logged in bad.log
    assert serves(bad)


@pytest.mark.parametrize(
    ("what", "logged"),
    [
        ("raise", "ValueError: plain"),
        ("exit", "the handler called exit(4)"),
        ("stop", "the handler raised StopIteration"),
        ("keyboard", "KeyboardInterrupt"),
        ("awaits", "AttributeError"),
    ],
)
def test_in_a_thread_too(bad: Front, what: str, logged: str) -> None:
    assert bad.ask_json(id=5, path=f"/plain/{what}") == (500, FAILED)
    assert logged in bad.log
    assert serves(bad)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("bad/nan", 422, "the answer holds NaN or infinity, which JSON cannot say"),
        ("bad/nan_array", 422, "the answer holds NaN or infinity, which JSON cannot say"),
        ("bad/dtype", 400, "input 'x': dtype is float64, allowed float32"),
        ("plain/dtype", 400, "input 'x': dtype is int32, allowed float32"),
        ("bad/strings", 400, "input 'x': is list, allowed an array or numbers in lists"),
        ("bad/unknown", 400, "unknown input 'z': the model takes x"),
        ("bad/missing", 400, "missing input 'x': float32[batch,2]"),
        ("bad/nobody", 400, "input 'x': is NoneType, allowed an array or numbers in lists"),
        ("bad/another", 404, "no such model"),
    ],
)
def test_what_it_asks_of_models_is_checked(bad: Front, path: str, status: int, said: str) -> None:
    assert bad.ask_json(path=f"/{path}") == (status, {"error": said})
    assert serves(bad)


@pytest.mark.parametrize("what", ["unread", "cancel_self"])
def test_a_request_that_cancels_itself_is_over(bad: Front, what: str) -> None:
    assert bad.ask(path=f"/bad/{what}")[0] == 499
    assert serves(bad)


def test_a_thread_that_raises_cancelled(bad: Front) -> None:
    assert bad.ask(path="/plain/cancelled")[0] == 499
    assert serves(bad)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("bad/task", {}),
        ("plain/thread", {}),
        ("bad/fork", {"child": "ended"}),
        ("bad/fork_exit", {"status": 0}),
        ("bad/descriptors", {}),
        ("bad/stdout", {}),
        ("bad/signal", {}),
        ("bad/chdir", {}),
        ("bad/closes_stdout", {}),
    ],
)
def test_it_goes_on_after(bad: Front, path: str, said: object) -> None:
    assert bad.ask_json(path=f"/{path}") == (200, said)
    assert serves(bad)
    if path == "bad/fork":
        assert "a child that the handler forked came back" in bad.log


def test_without_a_log_it_answers_all_the_same(bad: Front) -> None:
    assert bad.ask_json(id=5, path="/bad/closes_stderr") == (500, FAILED)
    assert serves(bad)


def test_one_that_does_not_let_itself_be_cancelled(bad: Front) -> None:
    bad.request(5, path="/bad/swallows")
    assert bad.alive()
    bad.send({"t": "cancel", "id": 5})
    assert bad.next(5)[0]["t"] == "answer"
    assert serves(bad)


def test_one_that_blocks_the_loop_shows_where(bad: Front, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    assert bad.ask(str(gate).encode(), path="/bad/gate")[0] == 200
    bad.request(5, path="/bad/blocks")
    while "in block" not in bad.log:  # the front does this when a pong is late
        os.kill(bad.process.pid, signal.SIGUSR1)
        time.sleep(0.05)
    gate.touch()
    assert bad.next(5)[0]["status"] == 200
    assert serves(bad)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("leave", 9),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("kill", -signal.SIGKILL),
    ],
)
def test_one_that_dies(bad_file: Path, what: str, code: int) -> None:
    with started(bad_file) as front:
        front.request(5, path=f"/bad/{what}")
        assert front.exit_code() == code
        assert front.ended.wait(60)
        if what in ("segfault", "abort"):
            assert f"in do_{what}" in front.log


# --- those that cannot be loaded ---------------------------------------------------------------------------------

ROUTED = """
from mctl.handlers import route
class Handler:
    def __init__(self, context): pass
    @route("POST", "/a")
    async def a(self, request): return {}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`handler.py` holds no handler"),
        ("def f(:", "`handler.py` cannot be imported: SyntaxError: invalid syntax (handler.py, line 1)"),
        ("\x00", "`handler.py` cannot be imported: "),
        ("import no_such", "cannot be imported: ModuleNotFoundError: No module named 'no_such' (handler.py:1)"),
        ("\n\n1 / 0", "`handler.py` cannot be imported: ZeroDivisionError: division by zero (handler.py:3)"),
        ("raise SystemExit(3)", "`handler.py` cannot be imported: SystemExit: 3 (handler.py:1)"),
        ("class A:\n def f(self): pass", "`handler.py` holds no handler"),
        (ROUTED.replace("pass", "1 / 0"), "`Handler(context)` of `handler.py` failed: ZeroDivisionError"),
        (ROUTED.replace("pass", "raise SystemExit"), "`Handler(context)` of `handler.py` failed: SystemExit"),
        (ROUTED.replace(", context", ""), "`Handler(context)` of `handler.py` failed: TypeError"),
        (ROUTED.replace("request", "req"), "`a` takes `req`, which nobody gives"),
        (ROUTED.replace('"/a"', '"a"'), "the route `a` does not begin with `/` (handler.py:5)"),
        (ROUTED + ROUTED.replace("Handler", "Other"), "several classes with routes: Handler, Other"),
        ("def handle(data, context): raise ValueError('at init')", "cannot be initialized: ValueError: at init"),
        ("class A:\n def __init__(self): 1 / 0\n def handle(self, data, context): pass", "ZeroDivisionError"),
        ("class A:\n def initialize(self, c): c.x\n def handle(self, data, context): pass", "AttributeError"),
        ("class A:\n def handle(self): 0\nclass B:\n def handle(self): 0", "several classes with `handle`: A, B"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_loaded_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "handler.py"
    path.write_text(text)
    context = Context("m", "1", msgspec.convert(CONTRACT, Contract), tmp_path)
    with pytest.raises(HandlerError) as caught:
        load_application(str(path), context)
    assert said in caught.value.message


def test_the_process_says_why_too(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text("import math\nprint('told')\nmath.sqrt(-1)\n")
    with started(path) as front:
        assert front.ready["t"] == "failed"
        assert "`handler.py` cannot be imported: ValueError: " in front.ready["error"]
        assert "line 3, in <module>" in front.ready["trace"]
        assert front.exit_code() == 1 and "told" in front.log
    with started(tmp_path / "none.py") as front:
        assert front.ready["error"].startswith(f"there is no file `{tmp_path}/none.py`")
    with started("stock:nothing") as front:
        assert front.ready["error"].startswith("there is no stock handler `nothing` (there are text-embedding, ")


def test_a_handler_that_dies_while_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text("import os\nos._exit(5)\n")
    with started(path) as front:
        assert front.ready == {"t": "gone", "code": 5}


def test_an_order_that_is_none(tmp_path: Path) -> None:
    with started(tmp_path, contract={"dims": 5}) as front:
        assert front.ready["t"] == "failed" and json.dumps(front.ready["error"])

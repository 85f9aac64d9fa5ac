"""What is done now, on stderr, while it takes a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import console


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """A function that shows what is done now: in one line that changes, or now and then where that is no terminal."""
    if not console.talk().is_terminal:
        yield _now_and_then()
        return
    with console.talk().status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


def _now_and_then(seconds: float = 2.0) -> Callable[[str], None]:
    """Says a text if the one before was said some seconds ago."""
    last = float("-inf")

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            console.say(text)
            last = time.monotonic()

    return say

"""README and docs: their commands work in the order that they stand in, and their links lead somewhere."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks by their language, and the indented ones as `sh`, in order."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```$|(?:^    [^\n]*\n?)+", text, re.MULTILINE | re.DOTALL)
    for block in found:
        yield (block[1], block[2]) if block[1] else ("sh", re.sub(r"^    ", "", block[0], flags=re.MULTILINE))


def commands(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


class Reader:
    """Somebody in an empty folder who types what stands there. The server gets a free port in place of 8000."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path}
        self.server: subprocess.Popen[str] | None = None
        self.url = ""

    def follow(self, text: str) -> list[str]:
        """What each command printed on stdout."""
        printed = []
        for language, block in blocks(text):
            if language == "python":
                (self.folder / "model.py").write_text(block)
                continue
            for command in commands(block):
                printed.append(self.serve(command) if command.startswith("mctl serve") else self.run(command))
        return printed

    def run(self, command: str) -> str:
        typed = command.replace("http://127.0.0.1:8000", self.url)
        done = subprocess.run(
            ["bash", "-c", typed], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def serve(self, command: str) -> str:
        log = self.folder / "server.log"
        with log.open("w") as stderr:
            words = ["exec", *command.split(), "--port=0"]
            self.server = subprocess.Popen(
                ["bash", "-c", " ".join(words)], cwd=self.folder, env=self.environment, stderr=stderr, text=True
            )
        for _ in range(1200):
            said = log.read_text()
            if "\nready: " in said:
                self.url = re.search(r"listening on (http://\S+)", said)[1]
                return ""
            assert self.server.poll() is None, said
            time.sleep(0.1)
        raise AssertionError(f"not ready: {log.read_text()}")

    def close(self) -> None:
        if self.server:
            self.server.terminate()
            self.server.wait(60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    folder = tmp_path / "my models"
    folder.mkdir()
    reader = Reader(folder)
    yield reader
    reader.close()


def test_the_first_page_from_top_to_bottom(reader: Reader) -> None:
    page = (ROOT / "docs" / "first-model.md").read_text()
    printed = reader.follow(page.split("## In CI")[0])
    assert '"model_name":"scorer"' in printed[-1] and '"shape":[1,10]' in printed[-1]


def test_the_readmes_two_commands(reader: Reader) -> None:
    text = (ROOT / "README.md").read_text()
    reader.follow(text.split("## Your first model")[1].split("## What you get")[0])
    page = reader.run("curl -s http://127.0.0.1:8000")
    example = next(line for line in page.splitlines() if "/infer" in line and "curl" in line)
    assert '"outputs"' in reader.run(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_readme_is_read() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900

"""Builds mctl-runner's fuzz targets and runs them: `python -m tests.fuzz --seconds 600 http manifest`.

It needs clang with libFuzzer (Debian: `clang libclang-rt-dev`). What a target finds stays in build/fuzz/found, and its
corpus in build/fuzz/corpus, where the next run goes on.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from .seeds import seeds, words

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/fuzz"
TARGETS = sorted(path.stem for path in (ROOT / "runner/cpp/fuzz").glob("*.cc"))
LONGEST = {"expression": 300, "http": 8192}  # bytes of an input; otherwise 16384
MEMORY = 2048  # MB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Runs the fuzz targets of mctl-runner.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} [all]")
    parser.add_argument("--seconds", type=int, default=60, help="of each target [60]")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    build()
    found = [target for target in options.targets or TARGETS if not run(target, options.seconds)]
    for target in found:
        print(f"error: fuzz-{target} found something: run it again with the input in {BUILD / 'found' / target}")
    return 1 if found else 0


def build() -> None:
    """Configures and builds with clang, in build/fuzz."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    for step in (["--preset", "fuzz", f"-DPYTHON={sys.executable}"], ["--build", "--preset", "fuzz"]):
        done = subprocess.run(
            ["cmake", *step], cwd=ROOT / "runner/cpp", env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"error: the fuzz targets cannot be built\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def run(target: str, seconds: int) -> bool:
    """Prints what was executed; False if an input broke the target."""
    corpus, found, start = (BUILD / kind / target for kind in ("corpus", "found", "seeds"))
    for folder in (corpus, found, start):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds(target):
        (start / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    dictionary = BUILD / f"{target}.dict"
    dictionary.write_text("".join(f"{_quoted(word)}\n" for word in sorted(words(target))), encoding="ascii")
    command = [
        BUILD / f"fuzz-{target}",
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST.get(target, 16384)}",
        f"-rss_limit_mb={MEMORY}",
        f"-artifact_prefix={found}/",
        f"-dict={dictionary}",
        "-timeout=10",
        "-print_final_stats=1",
        corpus,
        start,
    ]
    log = BUILD / f"{target}.log"
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    text = log.read_text(encoding="utf-8", errors="replace")
    executed = re.findall(r"number_of_executed_units: (\d+)", text)
    covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
    if done.returncode or not executed or not covered:
        print(text[-6000:])
        return False
    edges, features, inputs = covered[-1]
    print(f"{target}: {executed[-1]} executions in {seconds} s, {edges} edges, {features} features, {inputs} inputs")
    return True


def _quoted(word: bytes) -> str:
    return '"' + "".join(chr(c) if c < 128 and chr(c).isalnum() else f"\\x{c:02x}" for c in word) + '"'


if __name__ == "__main__":
    sys.exit(main())

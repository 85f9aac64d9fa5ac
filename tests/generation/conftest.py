"""A small Llama with a tokenizer, as a bundle: exported and compiled once a session by the public commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mctl.generation.engine import Model, load_model

from ..conftest import succeed
from . import models


@dataclass(frozen=True)
class Llama:
    folder: Path
    bundle: Path
    eager: Any


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("llama")
    model = models.hugging_face("llama")
    model.save_pretrained(folder / "model")
    models.save_tokenizer(folder / "model")
    program, bundle = folder / "program.pt2", folder / "bundle.pt2"
    succeed("export", folder / "model", "--task", "text-generation", "--eos", "96", "-o", program)
    succeed("compile", program, "-o", bundle)
    return Llama(folder / "model", bundle, model)


@pytest.fixture(scope="session")
def loaded(llama: Llama) -> Model:
    return load_model(llama.bundle)

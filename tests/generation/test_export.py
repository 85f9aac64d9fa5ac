"""From a model to its step: the program's tokens are the model's own, and what cannot be a step is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mctl.bundle_format.errors import ExportError, UsageError
from mctl.export.program import load_program
from mctl.generation.blocks import BLOCK
from mctl.generation.engine import generate, run_to_end
from mctl.generation.export import GenerationRequest, ProgramSteps, export_generation

from . import models

PROMPTS = [[5], [7, 1, 30, 2, 9, 11, 40], list(range(20, 53))]


def export(spec: Path, folder: Path, **options: Any) -> Path:
    output = folder / "program.pt2"
    export_generation(GenerationRequest(str(spec), output, **options), lambda _: None)
    return output


def continued(path: Path, prompts: list[list[int]], count: int, step_tokens: int) -> list[list[int]]:
    """Greedy tokens by the exported program, all prompts together."""
    program = load_program(path)
    generation = program.manifest.generation
    assert generation is not None
    steps = ProgramSteps(program.exported, generation, 40)
    made = generate(steps, generation, prompts, most=count, ignore_eos=True, step_tokens=step_tokens)
    return [answer.tokens for answer in run_to_end(made)]


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "gpt2"])
def test_a_hugging_face_model_continues_as_it_does_itself(kind: str, tmp_path: Path) -> None:
    model = models.hugging_face(kind)
    model.generation_config.eos_token_id = [3, 96]
    model.save_pretrained(tmp_path / "model")
    path = export(tmp_path / "model", tmp_path)
    wanted = []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
        )
        wanted.append(made[0, len(prompt) :].tolist())
    assert continued(path, PROMPTS, 20, step_tokens=19) == wanted
    generation = load_program(path).manifest.generation
    assert generation is not None
    assert (generation.vocabulary, generation.context, generation.eos) == (97, 128, (3, 96))
    windows = [(layer.window, layer.softcap, layer.sinks) for layer in generation.layers]
    assert (
        windows
        == {
            "gemma2": [(9, 50.0, False), (0, 50.0, False)],
            "gpt_oss": [(9, 0.0, True), (0, 0.0, True)],
            "gpt2": [(0, 0.0, False)] * 2,
        }[kind]
    )


@pytest.mark.parametrize(
    ("places", "logits"),
    [(models.COUNTED, models.LAST_LOGITS), (models.CUT, models.ALL_LOGITS)],
    ids=["nano-gpt", "a table of positions"],
)
def test_a_plain_module_continues_as_it_does_itself(places: str, logits: str, tmp_path: Path) -> None:
    file = models.nano(tmp_path, places=places, logits=logits)
    path = export(file, tmp_path)
    module: dict[str, Any] = {}
    exec(file.read_text(), module)
    wanted = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                made = module["model"].eval()(torch.tensor([tokens]))
            tokens.append(int((made[0] if isinstance(made, tuple) else made)[0, -1].argmax()))
        wanted.append(tokens[len(prompt) :])
    assert continued(path, PROMPTS, 12, step_tokens=BLOCK) == wanted
    with pytest.raises(UsageError, match="cannot hold a block"):
        continued(path, PROMPTS, 12, step_tokens=BLOCK - 1)


def test_an_explicit_forward(tmp_path: Path) -> None:
    """Grouped heads, a window, and positions that the model turns into what it likes."""
    file = tmp_path / "explicit.py"
    file.write_text("""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(31, 24), nn.Linear(24, 48), nn.Linear(24, 31)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens) + torch.sin(positions[:, None] * torch.arange(1, 25) / 24)
        q, k, v = self.qkv(x).split([24, 12, 12], dim=1)
        y = attend(q.view(-1, 4, 6), k.view(-1, 2, 6), v.view(-1, 2, 6), window=5)
        return self.head(x + y.reshape(-1, 24))


torch.manual_seed(0)
model = Model()
""")
    with pytest.raises(UsageError, match="how many tokens"):
        export(file, tmp_path)
    path = export(file, tmp_path, context=50, eos=(7,), cache_dtype="bfloat16")
    generation = load_program(path).manifest.generation
    assert generation is not None
    assert (generation.context, generation.eos, generation.cache_dtype) == (50, (7,), "bfloat16")
    assert [layer.window for layer in generation.layers] == [5] and generation.groups[0].heads == 2


SOFTMAX = """w = (q @ k.transpose(2, 3)).softmax(-1)
        y = w @ v"""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"attention": "y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(t, t).tril() > 0)"},
            r"is given a mask \(nano.py:16\)",
        ),
        ({"attention": "y = F.scaled_dot_product_attention(q, k, v)"}, r"is not causal \(nano.py:16\)"),
        ({"attention": SOFTMAX}, r"never calls `scaled_dot_product_attention`: its own softmax is at nano.py:16"),
        ({"places": "self.places.weight.flip(0)[64 - t:].flip(0)"}, "is not the model: at prompt 15 in chunks"),
        ({"logits": "return x.sum()"}, r"returns Tensor of shape \[\]"),
        ({"logits": "return x + torch.randn_like(x)"}, "draws random numbers"),
    ],
    ids=["mask", "not causal", "softmax", "positions", "no logits", "random"],
)
def test_what_cannot_be_a_step_is_refused(changed: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        export(models.nano(tmp_path, **changed), tmp_path)
    assert not (tmp_path / "program.pt2").exists()


def test_other_models_of_transformers_are_refused(tmp_path: Path) -> None:
    models.hugging_face("bloom", n_layer=2, n_head=4).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ExportError, match="has 2 layers and called transformers' attention 0 times"):
        export(tmp_path / "bloom", tmp_path)
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5/config.json").write_text(
        '{"model_type": "t5", "is_encoder_decoder": true, "architectures": ["T5ForConditionalGeneration"]}'
    )
    with pytest.raises(ExportError, match="T5ForConditionalGeneration is an encoder with a decoder"):
        export(tmp_path / "t5", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no `config\.json`"):
        export(tmp_path / "empty", tmp_path)

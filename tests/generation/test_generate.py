"""A compiled language model: its tokens are eager's, its bits depend on nothing else, and the commands say so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mctl.bundle_format.archive import open_bundle
from mctl.bundle_format.errors import UsageError
from mctl.generation.engine import Model, generate, run_to_end
from mctl.generation.sampler import Sampling
from mctl.generation.step import LOGITS, Part, step_inputs
from mctl.generation.text import Stream, Tokenizer
from mctl.parity.continuing import is_invariant

from ..conftest import mctl, succeed
from .conftest import Llama

PROMPTS = [[5], [7, 1, 30, 2, 9, 11, 40], list(range(20, 53))]


def tokens(model: Model, prompts: list[list[int]], sampling: Sampling = Sampling(), **options: Any) -> list[list[int]]:  # noqa: B008
    made = generate(model, model.generation, prompts, sampling, **{"most": 20, "ignore_eos": True, **options})
    return [answer.tokens for answer in run_to_end(made)]


def test_the_manifest_says_what_it_is(llama: Llama) -> None:
    with open_bundle(llama.bundle) as archive:
        manifest = archive.manifest
    assert manifest.needs == ("generate",) and manifest.schema == "mctl.bundle/2" and manifest.parity == "pass"
    generation = manifest.generation
    assert generation is not None
    assert generation.invariant and generation.eos == (96,) and (generation.vocabulary, generation.context) == (97, 128)
    assert [(group.layers, group.heads, group.key_size) for group in generation.groups] == [(2, 2, 8)]


def test_tokens_are_those_of_generate(llama: Llama, loaded: Model) -> None:
    wanted = [
        llama.eager.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)[0]
        for prompt in PROMPTS
    ]
    wanted = [made[len(prompt) :].tolist() for prompt, made in zip(PROMPTS, wanted, strict=True)]
    assert tokens(loaded, PROMPTS) == wanted
    assert [tokens(loaded, [prompt], step_tokens=16)[0] for prompt in PROMPTS] == wanted


def test_a_seed_gives_the_same_tokens_beside_others_and_in_small_steps(loaded: Model) -> None:
    drawn = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=11)
    alone = [tokens(loaded, [prompt], drawn)[0] for prompt in PROMPTS]
    assert tokens(loaded, PROMPTS, drawn) == alone
    assert tokens(loaded, [*PROMPTS[::-1], *[[9, 9]] * 20], drawn, step_tokens=30)[:3] == alone[::-1]
    assert tokens(loaded, PROMPTS, Sampling(1.5, 40, 0.95, seed=12)) != alone


def test_threads_change_no_bit(loaded: Model) -> None:
    """Of the whole step: long enough that torch's compiler shares its loops out."""
    parts = [Part([at * 7 % 97 for at in range(100)], 0, range(8 * i, 8 * i + 7), range(100)) for i in range(20)]
    threads, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            loaded.reset_state()
            made.append(loaded(parts))
            loaded.reset_state()
            assert torch.equal(loaded(parts[:1]), made[-1][:100])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, made[0]) for other in made)


def test_it_ends_at_eos_at_the_context_and_at_the_number_of_tokens(loaded: Model) -> None:
    free = tokens(loaded, [[5]], most=200)[0]
    assert len(free) == 127  # the context has 128
    ends = (free[10],)
    generation = type(loaded.generation)(
        **{name: getattr(loaded.generation, name) for name in loaded.generation.__struct_fields__} | {"eos": ends}
    )
    answer = run_to_end(generate(loaded, generation, [[5]], most=200))[0]
    assert answer.tokens == free[: free.index(ends[0]) + 1] and answer.finish == "stop"
    for prompt, said in (([], "no tokens"), ([97], "not in the vocabulary"), ([1] * 128, "no place is left")):
        with pytest.raises(UsageError, match=said):
            tokens(loaded, [prompt])


def test_a_step_of_nonsense_is_refused(loaded: Model) -> None:
    inputs = step_inputs([Part([1, 2, 3], 0, [0], [2])])
    assert loaded.call(inputs)[LOGITS].shape == (1, 97)
    for name, value in (("tokens", [1, 2, 97]), ("positions", [0, 1, 128]), ("lengths", [2]), ("ends", [4])):
        with pytest.raises(Exception, match=name if name in ("tokens", "positions") else "the model failed"):
            loaded.call({**inputs, name: torch.tensor(value)})


def test_commands(llama: Llama, tmp_path: Path) -> None:
    done = succeed("generate", llama.bundle, "--prompt", "the quick", "--max-tokens", 12, "--ignore-eos", "--json")
    said = json.loads(done.stdout)
    assert said["schema"] == "mctl.generate/1" and said["choices"][0]["finish_reason"] == "length"
    known = Tokenizer((llama.folder / "tokenizer.json").read_bytes())
    prompt = known.encode("the quick")
    made = llama.eager.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)[0]
    assert said["choices"][0]["tokens"] == made[len(prompt) :].tolist()
    assert said["choices"][0]["text"] == known.decode(said["choices"][0]["tokens"])
    streamed = succeed("generate", llama.bundle, "--prompt", "the quick", "--max-tokens", 12, "--ignore-eos")
    assert streamed.stdout == said["choices"][0]["text"] + "\n"
    ids = succeed(
        "generate", llama.bundle, "--prompt-ids", "5", "--prompt-ids", "7,1", "--max-tokens", 3, "--ignore-eos"
    )
    assert [len(line.split(",")) for line in ids.stdout.split()] == [3, 3]
    for arguments, text in (
        ([], "there is no prompt"),
        (["--prompt-ids", "1,x"], "is not understood"),
        (["--prompt-ids", "500"], "not in the vocabulary"),
        (["--prompt", "a", "--tokenizer", tmp_path], "there is no file"),
        (["--prompt-ids", "1", "--top-p", "0"], "top-p"),
    ):
        refused = mctl("generate", llama.bundle, *arguments)
        assert refused.returncode == 2 and text in refused.stderr and "Traceback" not in refused.stderr


def test_a_server_refuses_it_by_name(llama: Llama) -> None:
    refused = mctl("serve", llama.bundle, "--port", "0")
    assert refused.returncode != 0 and "generate" in refused.stderr and "Traceback" not in refused.stderr


def test_parity(llama: Llama, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    succeed("parity", llama.bundle, "--against", llama.folder, "--report", report)
    results = json.loads(report.read_text())["results"]
    assert {result["check"] for result in results} == {"golden", "logits", "tokens", "invariance"}
    assert len(results) > 20
    with torch.no_grad():
        llama.eager.model.layers[1].mlp.up_proj.weight[0] *= 1.5  # another model
    llama.eager.save_pretrained(tmp_path / "other")
    with torch.no_grad():
        llama.eager.model.layers[1].mlp.up_proj.weight[0] /= 1.5
    wrong = mctl("parity", llama.bundle, "--against", tmp_path / "other", "--report", report)
    assert wrong.returncode == 1
    failed = {result["check"] for result in json.loads(report.read_text())["results"] if result["verdict"] != "pass"}
    assert "logits" in failed and not failed & {"golden", "invariance"}


def test_text_is_held_back_until_a_character_is_whole() -> None:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = Stream(Bytes())  # type: ignore[arg-type]
    told = [stream.add(byte) for byte in "aé😀b".encode()]
    assert told == ["a", "", "é", "", "", "", "😀", "b"] and stream.end() == ""
    assert [stream.add(0xC3), stream.end()] == ["", "\ufffd"]


def test_a_report_without_invariance_is_not_invariant() -> None:
    class Report:
        results = ()

    assert not is_invariant(Report())  # type: ignore[arg-type]

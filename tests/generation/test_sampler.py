"""The next token: by published numbers of the generator, and by how often each is drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mctl.bundle_format.errors import UsageError
from mctl.generation.sampler import Sampling, choose, logprobs, philox, uniform

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "generation" / "sampling.json").read_text()
)

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),  # known answers of Random123's philox4x32-10
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter: tuple[int, int, int, int], key: tuple[int, int], wanted: tuple[int, ...]) -> None:
    assert philox(counter, key) == wanted


def test_numbers_depend_on_seed_index_and_choice_and_fill_the_interval() -> None:
    drawn = [uniform(seed, index, choice) for seed in (0, 1, -1, 2**40) for index in range(200) for choice in (0, 1)]
    assert len(set(drawn)) == len(drawn) and all(0 <= x < 1 for x in drawn)
    counts = torch.histc(torch.tensor(drawn, dtype=torch.float64), 8, 0, 1)
    assert counts.min() > 150  # of 200 expected


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['sampling']}, {case['row']}, {case['choice']}"
)
def test_vectors(case: dict[str, Any]) -> None:
    """Made with numpy, by full sorts and normalised probabilities."""
    logits = torch.tensor(VECTORS["rows"][case["row"]])
    given = dict(case["sampling"])
    if "bias" in given:
        given["bias"] = {int(token): bias for token, bias in given["bias"].items()}
    if "allowed" in given:
        given["allowed"] = frozenset(given["allowed"])
    seen = {"prompt": case["prompt"], "made": case["made"]}
    tokens = [choose(logits, Sampling(**given), index, case["choice"], **seen) for index in range(len(case["tokens"]))]
    assert tokens == case["tokens"]
    for token, wanted in zip(tokens, case["logprobs"], strict=True):
        own, best = logprobs(logits, token, len(case["top"]))
        assert own == pytest.approx(wanted, abs=1e-5)
        assert [each for each, _ in best] == [each for each, _ in case["top"]]
        assert [of for _, of in best] == pytest.approx([of for _, of in case["top"]], abs=1e-5)


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert choose(torch.tensor([0.0, 3.0, 1.0, 3.0]), Sampling(), 5) == 1


def shares(sampling: Sampling, logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    drawn = [choose(logits, sampling, index) for index in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count


def test_tokens_are_drawn_by_their_probability() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = probabilities.log() + 7
    torch.testing.assert_close(shares(Sampling(1.0), logits), probabilities, rtol=0, atol=0.03)
    hotter = torch.softmax(logits / 2, 0)
    torch.testing.assert_close(shares(Sampling(2.0), logits), hotter, rtol=0, atol=0.03)
    torch.testing.assert_close(
        shares(Sampling(1.0, top_k=2), logits), torch.tensor([0, 0.625, 0, 0.375]), rtol=0, atol=0.03
    )
    three = torch.tensor([0, 0.5, 0.15, 0.3]) / 0.95
    torch.testing.assert_close(shares(Sampling(1.0, top_p=0.9), logits), three, rtol=0, atol=0.03)
    assert shares(Sampling(1.0, top_p=0.4), logits, 50)[1] == 1


def test_ties_keep_the_lower_token() -> None:
    assert {choose(torch.zeros(5), Sampling(1.0, top_k=2), index) for index in range(50)} == {0, 1}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)  # type: ignore[arg-type]

"""The next token from logits: greedy or drawn, the same for the same seed whatever else is computed beside it."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ..bundle_format.errors import UsageError

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the most likely one; `top_k` of 0 and `top_p` of 1 leave all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"the temperature {self.temperature:g} is not 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is below 0", "0 leaves all tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p:g} is not above 0 and at most 1", "1 leaves all tokens")


def choose(logits: Tensor, sampling: Sampling, index: int, choice: int = 0) -> int:
    """The `index`-th new token of a request's `choice`-th answer, from logits [vocabulary].

    Logits are divided by the temperature; the `top_k` largest are kept, of these the most likely until together they
    have `top_p`, and one of those is drawn. Of equal ones the lower token is first.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores, tokens = torch.sort(logits.double(), descending=True, stable=True)
    if sampling.top_k:
        scores, tokens = scores[: sampling.top_k], tokens[: sampling.top_k]
    scores = scores / sampling.temperature
    shares = torch.softmax(scores, 0).cumsum(0)
    kept = int((shares < sampling.top_p).sum()) + 1  # the one that reaches it is kept
    shares = shares[:kept]
    drawn = uniform(sampling.seed, index, choice) * float(shares[-1])
    at = int(torch.searchsorted(shares, torch.tensor(drawn, dtype=torch.float64), right=True))
    return int(tokens[min(at, len(shares) - 1)])


def uniform(seed: int, index: int, choice: int = 0) -> float:
    """A number in [0, 1) that depends on these three alone: 53 bits of Philox."""
    key = (seed & _WORD, seed >> 32 & _WORD)
    words = philox((index & _WORD, index >> 32 & _WORD, choice & _WORD, 0), key)
    return ((words[0] >> 5) * 2.0**26 + (words[1] >> 6)) / 2.0**53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011)."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = right >> 32 ^ b ^ low, right & _WORD, left >> 32 ^ d ^ high, left & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return a, b, c, d

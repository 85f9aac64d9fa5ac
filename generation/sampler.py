"""The next token from logits: greedy or drawn, the same for the same seed whatever else is computed beside it.

runner/cpp/generation/sampler.cc does the same; tests/vectors/generation/sampling.json runs both. Tokens that are not
allowed go first; biases are added; a token that was seen, in the prompt or since, is penalised by `repetition`, one of
the new ones by `presence` and, each time it came, by `frequency`. Logits are divided by the temperature; the `top_k`
largest are kept, of these those with at least `min_p` of the largest one's probability, and of these the most likely
until together they have `top_p`; one of those is drawn. Of equal ones the lower token is first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from ..bundle_format.errors import UsageError

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the most likely one; what is not given changes nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition: float = 1.0  # logits of seen tokens are divided by it where they are above 0, else multiplied
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)  # by token
    allowed: frozenset[int] | None = None  # all others never come

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"the temperature {self.temperature:g} is not 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is below 0", "0 leaves all tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p:g} is not above 0 and at most 1", "1 leaves all tokens")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p {self.min_p:g} is not in 0 to 1", "0 leaves all tokens")
        if not (isfinite(self.repetition) and self.repetition > 0):
            raise UsageError(f"the repetition penalty {self.repetition:g} is not above 0", "1 changes nothing")


def choose(
    logits: Tensor,
    sampling: Sampling,
    index: int,
    choice: int = 0,
    *,
    prompt: Sequence[int] = (),
    made: Sequence[int] = (),
) -> int:
    """The `index`-th new token of a request's `choice`-th answer, from logits [vocabulary].

    `prompt` and `made`: the tokens so far, for penalties.
    """
    logits = adjusted(logits, sampling, prompt, made)
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores, tokens = torch.sort(logits.double(), descending=True, stable=True)
    kept = int((scores > -torch.inf).sum())
    kept = min(kept, sampling.top_k) if sampling.top_k else kept
    chances = torch.exp((scores[:kept] - scores[0]) / sampling.temperature)
    chances = chances[: int((chances >= sampling.min_p).sum())]
    shares = chances.cumsum(0)
    kept = int((shares < sampling.top_p * shares[-1]).sum()) + 1  # the one that reaches it is kept
    shares = shares[:kept]
    drawn = uniform(sampling.seed, index, choice) * float(shares[-1])
    at = int(torch.searchsorted(shares, torch.tensor(drawn, dtype=torch.float64), right=True))
    return int(tokens[min(at, len(shares) - 1)])


def adjusted(logits: Tensor, sampling: Sampling, prompt: Sequence[int], made: Sequence[int]) -> Tensor:
    """Logits after mask, biases and penalties, in float32."""
    logits = logits.float().clone()
    if sampling.allowed is not None:
        mask = torch.ones_like(logits, dtype=torch.bool)
        mask[sorted(sampling.allowed)] = False
        logits[mask] = -torch.inf
    for token, bias in sampling.bias.items():
        logits[token] += bias
    if sampling.repetition != 1:
        for token in {*prompt, *made}:
            logits[token] *= 1 / sampling.repetition if logits[token] > 0 else sampling.repetition
    if sampling.presence or sampling.frequency:
        for token, times in Counter(made).items():
            logits[token] -= sampling.presence + sampling.frequency * times
    return logits


def logprobs(logits: Tensor, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Of raw logits [vocabulary]: the token's log-probability, and the `most` likeliest tokens with theirs."""
    logs = torch.log_softmax(logits.double(), 0)
    best, tokens = torch.sort(logs, descending=True, stable=True)
    return float(logs[token]), [(int(tokens[at]), float(best[at])) for at in range(most)]


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

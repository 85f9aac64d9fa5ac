"""Generating text in this process: prompts in, tokens out, all requests in one step after another."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from ..bundle_format.manifest import Generation, Manifest
from ..runner.session import Session, load
from .blocks import BLOCK
from .policy import Planned, Policy, Running, Settings
from .sampler import Sampling, choose
from .step import LOGITS, Part, cache_names, new_caches, step_inputs

STEP_TOKENS = 512  # of prompts in one step, at most: beyond, nothing is gained
Finish = Literal["stop", "length", "context"]


class Steps(Protocol):
    """What computes steps, and keeps what it has seen."""

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Logits of the parts' wanted tokens."""


class Caches:
    """The caches of one bundle, which grow to the blocks that steps name."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.tensors: list[Tensor] = new_caches(generation, 1)

    def reach(self, blocks: int) -> list[Tensor]:
        """Caches of at least so many blocks; what they held is kept."""
        have = self.tensors[0].shape[1]
        if blocks > have:
            larger = new_caches(self.generation, max(blocks, 2 * have))
            for new, old in zip(larger, self.tensors, strict=True):
                new[:, :have] = old
            self.tensors = larger
        return self.tensors

    def forget(self) -> None:
        """All of it is NaN again."""
        for tensor in self.tensors:
            tensor.fill_(float("nan"))


class Model:
    """A bundle that continues text, loaded into this process. A context manager that closes it."""

    def __init__(self, session: Session, generation: Generation) -> None:
        self.session, self.generation = session, generation
        self.caches = Caches(generation)
        self.step_tokens = min(STEP_TOKENS, session.contract.dim("tokens").max)

    def call(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step from its inputs without the caches. ContractError, ModelError."""
        caches = self.caches.reach(int(inputs["tables"].max()) + 1)
        made = self.session.call({**inputs, **dict(zip(cache_names(self.generation), caches, strict=True))})
        return {LOGITS: torch.as_tensor(made[LOGITS])}

    def reset_state(self) -> None:
        self.caches.forget()

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        return self.call(step_inputs(parts))[LOGITS]

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


def load_model(bundle: Path, threads: int | None = None) -> Model:
    """UsageError for a bundle that does not continue text; what `runner.load` raises."""
    with open_bundle(bundle) as archive:
        generation = generation_of(archive.manifest, bundle)
    return Model(load(bundle, threads), generation)


def generation_of(manifest: Manifest, bundle: Path) -> Generation:
    if manifest.generation is None:
        hint = "export the model with `--task text-generation`; `mctl run` runs other bundles"
        raise UsageError(f"`{bundle}` does not continue text", hint)
    return manifest.generation


@dataclass(slots=True)
class Answer:
    """A prompt's new tokens so far, and why they ended."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


def generate(
    steps: Steps,
    generation: Generation,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    most: int = 64,
    ignore_eos: bool = False,
    step_tokens: int = STEP_TOKENS,
) -> "Tokens":
    """(prompt's index, token) as tokens come, `most` for each prompt at most; the generator's value is the answers.

    UsageError for a prompt that is empty, does not fit the context, or has a token that the model does not know, and
    for steps that have no room for a block of a prompt.
    """
    if step_tokens < BLOCK:
        raise UsageError(f"a step of {step_tokens} tokens cannot hold a block of a prompt, which is {BLOCK} tokens")
    for prompt in prompts:
        check_prompt(generation, prompt)
    answers = [Answer(tuple(prompt)) for prompt in prompts]
    ends = () if ignore_eos else generation.eos
    policy = _policy(generation, prompts, most, step_tokens)
    while (step := policy.next_step()) is not None:
        rows = steps([_part(policy.sequence(planned.id), planned) for planned in step.parts])
        made = {}
        for planned, row in zip(step.parts, rows, strict=True):
            if planned.wanted:
                answer = answers[planned.id]
                made[planned.id] = choose(row, sampling, len(answer.tokens), prompt=answer.prompt, made=answer.tokens)
        policy.stepped(made)
        for at, token in made.items():
            answers[at].tokens.append(token)
            answers[at].finish = _finish(answers[at], generation, ends, most)
            if answers[at].finish:
                policy.remove(at)
            yield at, token
    return answers


def _policy(generation: Generation, prompts: Sequence[Sequence[int]], most: int, step_tokens: int) -> Policy:
    """One in whose caches all prompts find room."""
    blocks = sum(-(-min(len(prompt) + most, generation.context) // BLOCK) for prompt in prompts)
    together = max(1, step_tokens - BLOCK)
    policy = Policy(Settings(blocks, generation.context, step_tokens, step_tokens, sequences=together))
    for at, prompt in enumerate(prompts):
        policy.submit(at, prompt, most)
    return policy


def _part(sequence: Running, planned: Planned) -> Part:
    """With logits of the last token, which is the one that may be wanted."""
    end = planned.start + planned.count
    wanted = range(planned.count - 1, planned.count)
    return Part(sequence.tokens[planned.start : end], planned.start, sequence.blocks[: -(-end // BLOCK)], wanted)


def _finish(answer: Answer, generation: Generation, ends: Sequence[int], most: int) -> Finish | None:
    if answer.tokens[-1] in ends:
        return "stop"
    if len(answer.tokens) >= most:
        return "length"
    return "context" if len(answer.prompt) + len(answer.tokens) >= generation.context else None


def check_prompt(generation: Generation, prompt: Sequence[int]) -> None:
    if not prompt:
        raise UsageError("a prompt has no tokens", "give it at least one")
    if len(prompt) >= generation.context:
        raise UsageError(
            f"a prompt has {len(prompt)} tokens, and the context {generation.context}: no place is left for an answer"
        )
    for token in prompt:
        if not 0 <= token < generation.vocabulary:
            raise UsageError(f"the token {token} is not in the vocabulary, 0 to {generation.vocabulary - 1}")


Tokens = Generator[tuple[int, int], None, list[Answer]]


def run_to_end(generator: Tokens, tell: Callable[[int, int], None] = lambda *_: None) -> list[Answer]:
    """The answers of `generate`, telling each token as it comes."""
    while True:
        try:
            tell(*next(generator))
        except StopIteration as done:
            answers: list[Answer] = done.value
            return answers

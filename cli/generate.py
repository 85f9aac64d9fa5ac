"""`mctl generate`: a bundle that continues text, in this process."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ..bundle_format.archive import open_bundle
from ..bundle_format.errors import UsageError
from . import console

_BUNDLE = Path("bundle.pt2")


def generate(
    bundle: Annotated[Path, typer.Argument(help="What `mctl compile` made of a model for text generation.")] = _BUNDLE,
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="What is continued; may be given again.")] = [],  # noqa: B006
    prompt_ids: Annotated[list[str], typer.Option(metavar="N,N,…", help="The same as tokens.")] = [],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="New tokens for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Draw from so many tokens [0: all].")] = 0,
    top_p: Annotated[float, typer.Option(metavar="SHARE", help="Draw from the tokens that have this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn: the same seed gives the same text.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after a token that ends a text.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where `tokenizer.json` is, if not in the bundle.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="OpenMP threads [torch's own choice].")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Continue prompts with a compiled language model, all of them at once."""
    prompts = [parse_ids(text) for text in prompt_ids]
    if not prompt and not prompts:
        raise UsageError("there is no prompt", "give `--prompt TEXT`, or tokens: `--prompt-ids 1,2,3`")
    with open_bundle(bundle):  # what is no bundle is said before torch is imported
        pass
    from ..generation import engine, text
    from ..generation.sampler import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    with engine.load_model(bundle, threads) as model:
        known = text.tokenizer_of(bundle, tokenizer) if prompt else None
        if known is not None:
            prompts = [*map(known.encode, prompt), *prompts]
        start = time.perf_counter()
        tokens = engine.generate(
            model,
            model.generation,
            prompts,
            sampling,
            most=max_tokens,
            ignore_eos=ignore_eos,
            step_tokens=model.step_tokens,
        )
        stream = text.Stream(known) if known and len(prompts) == 1 and not json else None
        answers = engine.run_to_end(tokens, lambda _, token: _tell(stream.add(token)) if stream else None)
        seconds = time.perf_counter() - start
    texts = [known.decode(answer.tokens) if known else None for answer in answers]
    count = sum(len(answer.tokens) for answer in answers)
    if json:
        choices = [
            {"prompt_tokens": len(answer.prompt), "tokens": answer.tokens, "text": told, "finish_reason": answer.finish}
            for answer, told in zip(answers, texts, strict=True)
        ]
        console.emit_json("mctl.generate/1", True, choices=choices, seconds=seconds)
        return
    if stream:
        _tell(stream.end() + "\n")
    else:
        console.write(
            ",".join(map(str, answer.tokens)) if told is None else told
            for answer, told in zip(answers, texts, strict=True)
        )
    console.say(f"{count} tokens in {seconds:.3f} s, {count / seconds:,.1f} tokens/s")


def parse_ids(text: str, flag: str = "--prompt-ids") -> list[int]:
    """`"1,2,3"` as tokens. UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"`{flag} {text}` is not understood", f"write it as `{flag} 1,2,3`")
    return [int(part) for part in parts]


def _tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

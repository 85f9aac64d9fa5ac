"""The rules of the policy by shared vectors, and random schedules: no block is lost, and none holds a stranger's."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mctl.generation.blocks import BLOCK, Blocks
from mctl.generation.policy import Policy, Settings

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "generation" / "policy.json").read_text()
)


def run(case: dict[str, Any]) -> list[Any]:
    """What each event of a case gave, where it gives something. A token is its own position."""
    policy = Policy(Settings(**case["settings"]))
    told = []
    for event in case["events"]:
        match event["do"]:
            case "submit":
                given = {name: event[name] for name in ("client", "salt", "after") if name in event}
                policy.submit(event["id"], range_of(event["tokens"]), event["most"], **given)
            case "remove":
                policy.remove(event["id"])
            case "pause" | "resume":
                policy.pause(event["id"], event["do"] == "pause")
            case "step":
                told.append(step(policy))
            case "start":
                told.append(start(policy))
            case "end":
                end(policy)
            case "die":
                told.append(policy.died())
            case "available":
                told.append(policy.blocks.available)
            case _:
                raise AssertionError(event)
    return told


def range_of(tokens: list[int]) -> list[int]:
    """`[first, count]`: consecutive tokens, so that prompts share a beginning or do not."""
    return list(range(tokens[0], tokens[0] + tokens[1]))


def start(policy: Policy) -> dict[str, Any] | None:
    made = policy.next_step()
    if made is None:
        return None
    parts = [[part.id, part.start, part.count] for part in made.parts]
    return {"parts": parts, "admitted": made.admitted, "preempted": made.preempted}


def end(policy: Policy) -> None:
    assert policy.step is not None
    policy.stepped({part.id: part.start + part.count for part in policy.step.parts if part.wanted})


def step(policy: Policy) -> dict[str, Any] | None:
    made = start(policy)
    if made is not None:
        end(policy)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    assert run(case) == case["gives"]


def test_what_never_fits_is_told_with_both_numbers() -> None:
    policy = Policy(Settings(blocks=3, context=64))
    assert policy.never_fits(40, 8) == ""
    assert policy.never_fits(40, 9) == "40 tokens and 9 new ones need 4 blocks of 16, there are 3"
    assert Policy(Settings(blocks=4, context=64)).never_fits(40, 999) == ""  # the context ends it before


class Caches:
    """Blocks as a model sees them: what was written where. A step reads all that its sequences have before it."""

    def __init__(self, blocks: int) -> None:
        self.slots: list[Any] = [None] * (blocks * BLOCK)

    def compute(self, policy: Policy) -> dict[int, int]:
        """The next token depends on each one before it, as the blocks have them."""
        assert policy.step is not None
        made = {}
        for part in policy.step.parts:
            sequence = next(each for each in policy._running if each.id == part.id)
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for at in range(part.start, part.start + part.count):
                self.slots[self.place(sequence.blocks, at)] = (sequence.salt, sequence.tokens[at], at)
            seen = [self.slots[self.place(sequence.blocks, at)] for at in range(part.start + part.count)]
            assert seen == [(sequence.salt, token, at) for at, token in enumerate(sequence.tokens[: len(seen)])]
            if part.wanted:
                made[part.id] = next_token(sequence.tokens)
        return made

    @staticmethod
    def place(blocks: list[int], at: int) -> int:
        return blocks[at // BLOCK] * BLOCK + at % BLOCK


TEXTS = [[at * at // 3 % (5 + of) for at in range(64)] for of in range(3)]  # that prompts begin with


def next_token(tokens: list[int]) -> int:
    return sum((at + 1) * token for at, token in enumerate(tokens)) % 5


@pytest.mark.parametrize("evict", [True, False])
def test_random_schedules_lose_no_block_and_change_no_token(evict: bool) -> None:
    """1,000 sequences, many of them cancelled, with pauses and deaths of the worker, in caches that are too small."""
    draw = random.Random(evict)
    policy = Policy(Settings(24, 200, step_tokens=40, budget=20, sequences=12, watermark=1, evict=evict))
    caches = Caches(24)
    waiting: dict[int, list[int]] = {}
    ended = cancelled = next_id = steps = 0
    while next_id < 1000 or waiting:
        if next_id < 1000 and draw.random() < 0.6:
            prompt = [*TEXTS[draw.randrange(3)][: draw.choice([0, 16, 40, 64])], draw.randrange(2)]
            most = draw.randrange(1, 40)
            after = draw.choice(list(waiting)) if waiting and draw.random() < 0.2 else None
            if not policy.never_fits(len(prompt), most):
                policy.submit(next_id, prompt, most, client=draw.randrange(3), salt=draw.randrange(2), after=after)
                waiting[next_id] = prompt
            next_id += 1
        if waiting and draw.random() < 0.1:
            policy.pause(draw.choice(list(waiting)), True)
        for each in list(waiting):
            if draw.random() < 0.3:
                policy.pause(each, False)
        step = policy.next_step()
        if waiting and draw.random() < 0.2:  # while the step runs
            gone = draw.choice(list(waiting))
            policy.remove(gone)
            del waiting[gone]
            cancelled += 1
        if step is None:
            continue
        steps += 1
        assert len(step.parts) <= 12 and sum(part.count for part in step.parts) <= 40
        if draw.random() < 0.02:
            guilty = policy.died()
            caches = Caches(24)
            waiting.pop(guilty, None)  # type: ignore[arg-type]
            continue
        policy.stepped(caches.compute(policy))
        for each in list(waiting):
            sequence = policy.sequence(each)
            if len(sequence.tokens) - sequence.prompt == sequence.most:
                wanted = list(waiting[each])
                for _ in range(sequence.most):
                    wanted.append(next_token(wanted))
                assert sequence.tokens == wanted
                policy.remove(each)
                del waiting[each]
                ended += 1
    assert policy.running == policy.waiting == 0
    assert policy.blocks.available == 24
    assert ended > 200 and cancelled > 200 and policy.counts.found_tokens > 200
    assert policy.counts.preemptions > 30 if evict else policy.counts.preemptions == 0


def test_least_recently_used_beginnings_go_first() -> None:
    blocks = Blocks(3)
    held = []
    for first in (0, 100, 200):
        block = blocks.take()
        assert block is not None
        blocks.publish([block], range(first, first + BLOCK), 7)
        held.append(block)
    assert blocks.take() is None
    for block in held:
        blocks.release([block])
    blocks.hold(held[0])
    blocks.release([held[0]])  # used again
    assert blocks.available == 3
    assert blocks.take() == held[1]
    assert blocks.find(range(100, 116), 7) == []
    assert blocks.find(range(16), 7) == [held[0]] and blocks.find(range(16), 8) == []
    assert blocks.find([*range(15), 99], 7) == []

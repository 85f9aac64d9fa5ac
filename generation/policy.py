"""Which tokens of which requests are computed in the next step: a function of what was asked and what came of it.

It has no clock and no caches: `Policy` is told of requests and of steps that ended, and says what to do next.
runner/cpp/engine/generation_policy.cc follows the same rules; tests/vectors/generation/policy.json runs both. A
sequence is one answer of a request; its turn is that of shares.py, with prompt and new tokens as rows. The older of
two is the one with the lower turn, then the one that came first.

G1. Budget: a step has at most `step_tokens` tokens, and `budget` ones if a sequence decodes in it; but prompts may
    always have one block.
G2. Sequences that lack one token come first, oldest first; then those that lack more, oldest first. What does not fit
    whole ends on a block's boundary.
G3. The oldest that waits is admitted if the blocks that it lacks, and `watermark` more if others run, can be taken, no
    sequence was preempted in this step, fewer than `sequences` run, and the step has room. It gets its blocks at once.
G4. If a block is needed and there is none, the youngest that is paused, else the youngest that runs, loses its blocks
    and waits again, with its turn. The oldest that is not paused is never the one. Without `evict` a sequence is
    admitted with all blocks that it can ever need, and none is preempted.
G5. A sequence begins with the published blocks that its tokens but the last begin with, if the salt is its own. A full
    block is published when the step that filled it has ended.
G6. Whatever is removed gives its blocks back at once, or when the step that it is in has ended.
G7. A sequence that comes `after` another waits until that one's prompt is computed, and finds its full blocks.
G8. A sequence that is paused is in no step.
G9. If the worker dies, all wait again, and the caches are empty. The sequences of the step are suspects: each is tried
    alone, those first that were tried less, until it has passed the place where it was. One that was alone when the
    worker died for the second time is guilty, and is removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..runner.shares import Shares
from .blocks import BLOCK, Blocks

STRIKES = 2  # deaths of a worker alone with a sequence


@dataclass(frozen=True, slots=True)
class Settings:
    blocks: int  # of the caches
    context: int  # tokens of a sequence, at most
    step_tokens: int = 512  # at least one block
    budget: int = 512
    sequences: int = 64  # that run at a time; with a block beside them they fit a step
    watermark: int = 0  # blocks
    evict: bool = True


@dataclass(slots=True, eq=False)
class Running:
    """One answer, whether it runs or waits."""

    id: int
    tokens: list[int]
    prompt: int  # tokens
    most: int  # new tokens
    client: int
    salt: int
    after: int | None
    order: int
    turn: int
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the blocks
    published: int = 0  # blocks
    computed: int = 0  # the most that `cached` ever was
    counted: bool = True  # in its client's share of the queue
    paused: bool = False
    removed: bool = False  # while a step with it runs
    strikes: int = 0
    suspect_until: int = 0  # tokens; 0: it is no suspect

    @property
    def left(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def age(self) -> tuple[int, int]:
        return self.turn, self.order


@dataclass(frozen=True, slots=True)
class Planned:
    """Tokens of one sequence in a step: `count` from `start` on; the next one is wanted if these are all it has."""

    id: int
    start: int
    count: int
    wanted: bool


@dataclass(slots=True)
class Step:
    parts: list[Planned] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Since the start."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    found_tokens: int = 0  # of prompts, in published blocks


class Policy:
    """The sequences of one model, and the blocks of its caches."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.blocks = Blocks(settings.blocks)
        self.counts = Counts()
        self.step: Step | None = None  # that runs
        self._all: dict[int, Running] = {}
        self._running: list[Running] = []  # oldest first
        self._waiting: list[Running] = []  # oldest first
        self._shares = Shares()
        self._arrivals = 0

    # --- what is asked

    def never_fits(self, prompt: int, most: int) -> str:
        """Why no worker could answer; empty if one can."""
        needed = self._blocks_for(min(prompt + most, self.settings.context))
        if needed <= self.settings.blocks:
            return ""
        return f"{prompt} tokens and {most} new ones need {needed} blocks of {BLOCK}, there are {self.settings.blocks}"

    def submit(
        self, id: int, tokens: Sequence[int], most: int, *, client: int = 0, salt: int = 0, after: int | None = None
    ) -> None:
        """`id` is no other's that is not removed. The caller has asked `never_fits`."""
        turn = self._shares.join(client, len(tokens) + most)
        new = Running(id, list(tokens), len(tokens), most, client, salt, after, self._arrivals, turn)
        self._arrivals += 1
        self._all[id] = new
        _insert(self._waiting, new)

    def remove(self, id: int) -> None:
        """It ended, or nobody waits for it."""
        sequence = self._all.pop(id)
        if sequence in self._waiting:
            self._leave_queue(sequence)
        elif self._in_step(id):
            sequence.removed = True
        else:
            self._running.remove(sequence)
            self._take_blocks(sequence)

    def pause(self, id: int, paused: bool) -> None:
        self._all[id].paused = paused

    def sequence(self, id: int) -> Running:
        return self._all[id]

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # --- steps

    def next_step(self) -> Step | None:
        """What to compute now; None if there is nothing. `stepped` or `died` ends it."""
        assert self.step is None
        step = Step()
        trial = self._trial()
        able = [each for each in self._running if not each.paused and (trial is None or each is trial)]
        for each in able:
            if each.left == 1 and each in self._running and self._grow(each, step, trial):
                _add(step, each, 1)
        decoding = len(step.parts)
        room = max(self.settings.budget - decoding, BLOCK) if decoding else self.settings.step_tokens
        room = min(room, self.settings.step_tokens - decoding)
        for each in able:
            if each.left > 1 and each in self._running:
                room -= self._prefill(step, each, room)
        while room > 0 and (next_one := self._admissible(step, trial)) is not None:
            self._admit(next_one, step)
            taken = self._prefill(step, next_one, room)
            room = room - taken if taken else 0
        self.step = step if step.parts else None
        return self.step

    def stepped(self, tokens: Mapping[int, int]) -> None:
        """The step has ended; `tokens`: the next one of each that wanted it."""
        step, self.step = self.step, None
        assert step is not None
        for part in step.parts:
            sequence = next(each for each in self._running if each.id == part.id)
            end = part.start + part.count
            self.counts.recomputed_tokens += max(0, min(end, sequence.computed) - part.start)
            sequence.cached, sequence.computed = end, max(end, sequence.computed)
            self._publish(sequence)
            if part.wanted:
                sequence.tokens.append(tokens[part.id])
            if sequence.cached >= sequence.suspect_until:
                sequence.suspect_until = sequence.strikes = 0
            if sequence.removed:
                self._running.remove(sequence)
                self._take_blocks(sequence)

    def died(self) -> int | None:
        """The worker died: the one that is guilty, which is removed."""
        parts, self.step = self.step.parts if self.step else [], None
        suspects = [(self._all[part.id], part) for part in parts if part.id in self._all]
        for sequence, part in suspects:
            sequence.strikes += sequence.suspect_until > 0 and len(parts) == 1
            sequence.suspect_until = max(sequence.suspect_until, part.start + part.count)
        guilty = next((sequence.id for sequence, _ in suspects if sequence.strikes >= STRIKES), None)
        self.blocks = Blocks(self.settings.blocks)
        for each in list(self._running):
            each.blocks, each.cached, each.published = [], 0, 0
            if not each.removed:
                _insert(self._waiting, each)
        self._running = []
        if guilty is not None:
            self.remove(guilty)
        return guilty

    # --- parts of a step

    def _trial(self) -> Running | None:
        """The suspect whose turn it is to run alone."""
        suspects = [each for each in (*self._running, *self._waiting) if each.suspect_until and not each.paused]
        return min(suspects, key=lambda each: (each.strikes, each.age), default=None)

    def _prefill(self, step: Step, sequence: Running, room: int) -> int:
        count = min(sequence.left, room)
        if count < sequence.left:
            count = (sequence.cached + count) // BLOCK * BLOCK - sequence.cached
        if count <= 0:
            return 0
        _add(step, sequence, count)
        return count

    def _grow(self, sequence: Running, step: Step, trial: Running | None) -> bool:
        """A place for one more token; False if it had to give its blocks up."""
        if sequence.cached < len(sequence.blocks) * BLOCK:
            return True
        while (block := self.blocks.take()) is None:
            victim = self._victim(trial)
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.blocks.append(block)
        return True

    def _victim(self, trial: Running | None) -> Running:
        paused = [each for each in self._running if each.paused and each is not trial]
        return (paused or [each for each in self._running if each is not trial])[-1]

    def _preempt(self, sequence: Running, step: Step) -> None:
        self._running.remove(sequence)
        self._take_blocks(sequence)
        _insert(self._waiting, sequence)
        step.preempted.append(sequence.id)
        self.counts.preemptions += 1

    def _admissible(self, step: Step, trial: Running | None) -> Running | None:
        if trial is not None:
            if trial in self._running:
                return None
            while not self._fits(trial):
                self._preempt(self._victim(trial), step)
            return trial
        if step.preempted or len(self._running) >= self.settings.sequences:
            return None
        head = next((each for each in self._waiting if not each.paused and not self._comes_later(each)), None)
        return head if head is not None and self._fits(head) else None

    def _comes_later(self, sequence: Running) -> bool:
        first = None if sequence.after is None else self._all.get(sequence.after)
        return first is not None and first.computed < first.prompt

    def _fits(self, sequence: Running) -> bool:
        found = self.blocks.find(sequence.tokens[:-1], sequence.salt)
        spare = self.settings.watermark if self._running and self.settings.evict else 0
        idle = sum(map(self.blocks.is_idle, found))
        return self.blocks.available - idle >= self._needed(sequence) - len(found) + spare

    def _needed(self, sequence: Running) -> int:
        whole = min(sequence.prompt + sequence.most, self.settings.context)
        return self._blocks_for(len(sequence.tokens) if self.settings.evict else whole)

    def _admit(self, sequence: Running, step: Step) -> None:
        self._leave_queue(sequence)
        self._shares.started(sequence.turn)
        found = self.blocks.find(sequence.tokens[:-1], sequence.salt)
        for block in found:
            self.blocks.hold(block)
        sequence.blocks = list(found)
        while len(sequence.blocks) < self._needed(sequence):
            taken = self.blocks.take()
            assert taken is not None
            sequence.blocks.append(taken)
        sequence.cached, sequence.published = len(found) * BLOCK, len(found)
        if not sequence.computed:
            self.counts.found_tokens += sequence.cached
        _insert(self._running, sequence)
        step.admitted.append(sequence.id)

    def _publish(self, sequence: Running) -> None:
        while sequence.published < sequence.cached // BLOCK:
            start = sequence.published * BLOCK
            sequence.published += 1
            held = sequence.blocks[: sequence.published]
            self.blocks.publish(held, sequence.tokens[start : start + BLOCK], sequence.salt)

    def _take_blocks(self, sequence: Running) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.cached, sequence.published = [], 0, 0

    def _leave_queue(self, sequence: Running) -> None:
        self._waiting.remove(sequence)
        if sequence.counted:
            self._shares.leave(sequence.client, sequence.prompt + sequence.most)
        sequence.counted = False

    def _in_step(self, id: int) -> bool:
        return self.step is not None and any(part.id == id for part in self.step.parts)

    @staticmethod
    def _blocks_for(tokens: int) -> int:
        return -(-tokens // BLOCK)


def _add(step: Step, sequence: Running, count: int) -> None:
    step.parts.append(Planned(sequence.id, sequence.cached, count, count == sequence.left))


def _insert(queue: list[Running], sequence: Running) -> None:
    at = next((i for i, other in enumerate(queue) if other.age > sequence.age), len(queue))
    queue.insert(at, sequence)

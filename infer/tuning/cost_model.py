"""What a round costs on this device, in steps of autoregressive decoding.

Decoders are timed as they run, compiled and with the host's part, in turn with the autoregressive
one: a clock that drifts or a neighbour on the machine moves both, and their ratio less. Shapes that
were not timed are interpolated within their family; a larger one never costs less.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoded, Decoder
from infer.tuning.candidates import Shape
from models.drafts.base import Draft
from models.lock import wait_for_lock
from models.speculate.sampling import SamplingConf
from models.target.target import Target

TURNS = 4  # times that a shape and the baseline are timed in turn
AUTOREGRESSIVE = "autoregressive"
MOST_TIMED = 12  # timings beyond the first ones, while another shape promises more


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """A user's tuners may compile side by side; who times something waits for the others.

    Who waits stands in the gate, so that nobody who comes later starts to compile before them. Not
    to be nested: the inner one would wait for the outer.
    """
    place = Path(tempfile.gettempdir())
    with (place / f"infer.tune-{os.getuid()}.lock").open("a") as file:
        with (place / f"infer.tune-{os.getuid()}.gate").open("a") as gate:  # opens as it is closed
            wait_for_lock(gate, alone=True)
            wait_for_lock(file, alone=alone)
        yield


@dataclass(kw_only=True)
class Bench:
    """Decoders of one draft for one batch and context, each built and compiled when asked for."""

    target: Target
    draft: Draft
    prompts: list[EvalPrompt]
    sampling: SamplingConf
    batch: int
    context: int
    max_new_tokens: int
    say: Callable[[str], None]
    decoders: dict[str, Decoder] = field(default_factory=dict)

    def decoder(self, one: Shape | None) -> Decoder:
        """That of a candidate, or the autoregressive one."""
        name = one.name if one else AUTOREGRESSIVE
        if name not in self.decoders:
            self.say(f"batch {self.batch}, context {self.context}: compiling {name}")
            shape = {"draft": self.draft, "tree": one.tree} if one else {}
            with turn(alone=False):
                made = Decoder(
                    self.target, sampling=self.sampling, slots=self.context, batch=self.batch,
                    layers=self.draft.needs.layers, **shape,
                )  # fmt: skip
                # one prompt more than rows: a refill compiles too
                self.decode(made, (self.prompts * (self.batch + 1))[: self.batch + 1], ends=False)
            self.decoders[name] = made
        return self.decoders[name]

    def decode(self, decoder: Decoder, some: list[EvalPrompt], *, ends: bool) -> list[Decoded]:
        """Answers, up to where they end or all of one length."""
        return decoder.decode(
            [p.ids for p in some], row_ids=[p.row_id for p in some],
            max_new_tokens=self.max_new_tokens, eos_ids=self.target.eos_ids if ends else None,
        )  # fmt: skip

    def steps(self, one: Shape) -> float:
        """Autoregressive steps that a round takes: the median of turns, each of medians."""
        plain, own = self.decoder(None), self.decoder(one)
        turns = []
        with turn(alone=True):
            for _ in range(TURNS):
                step, ours, again = map(self._round_s, (plain, own, plain))
                turns.append(2 * ours / (step + again))
        return statistics.median(turns)

    def _round_s(self, decoder: Decoder) -> float:
        """Of the rounds of some prompts: shapes are static, so which and past what end is one."""
        rows = self.decode(decoder, self.prompts[: self.batch], ends=False)
        return statistics.median(max((row.round_s for row in rows), key=len))

    def race(
        self, some: list[Shape], repeats: int
    ) -> dict[str, Float[ndarray, "prompts tokens_seconds"]]:
        """Tokens and seconds of every prompt in every mode, decoded there and back (ABBA).

        Seconds are what a slot's part of each round took: a round costs what it has slots for, so
        that is the speed of a busy machine, also where the last prompts leave slots empty. One row
        alone takes turns prompt by prompt. A batch takes all prompts at once, long turns: there the
        target alone goes before each mode, and its seconds say how fast the machine was just then.
        """
        modes = {one.name if one else AUTOREGRESSIVE: self.decoder(one) for one in [None, *some]}
        with turn(alone=True):  # all compiled before the first is timed
            if self.batch == 1:
                parts = [self._there_and_back(modes, [one], repeats) for one in self.prompts]
                return {name: np.concatenate([part[name] for part in parts]) for name in modes}
            return self._beside_the_target(modes, repeats)

    def _there_and_back(
        self, modes: dict[str, Decoder], some: list[EvalPrompt], repeats: int
    ) -> dict[str, ndarray]:
        sums = {name: np.zeros((len(some), 2)) for name in modes}
        for number in range(repeats):
            for name in list(modes)[:: 1 - 2 * (number % 2)]:
                sums[name] += self._tokens_and_seconds(modes[name], some)
        return sums

    def _beside_the_target(self, modes: dict[str, Decoder], repeats: int) -> dict[str, ndarray]:
        plain, runs = modes[AUTOREGRESSIVE], []
        sums = {name: np.zeros((len(self.prompts), 2)) for name in modes}
        others = [name for name in modes if name != AUTOREGRESSIVE]
        for number in range(repeats):
            for name in others[:: 1 - 2 * (number % 2)]:
                runs.append(self._tokens_and_seconds(plain, self.prompts))
                own = self._tokens_and_seconds(modes[name], self.prompts)
                took = runs[-1][:, 1].sum() or 1.0  # nothing where all end at their first token
                sums[name] += own / [1.0, took]
        mean = np.mean(runs, 0)
        for name in others:
            sums[name][:, 1] *= mean[:, 1].sum()
        return sums | {AUTOREGRESSIVE: repeats * mean}

    def _tokens_and_seconds(
        self, decoder: Decoder, some: list[EvalPrompt]
    ) -> Float[ndarray, "prompts tokens_seconds"]:
        rows = self.decode(decoder, some, ends=True)
        return np.array([[len(row.ids) - 1, sum(row.round_s) / self.batch] for row in rows], float)


class CostCurve:
    """Steps a round by candidate: measured where it was, else by its nodes and its depth.

    Chains lie between measured chains. Trees lie between measured trees of other sizes, less or
    more by what chains tell of a draft pass, and as far above or below as those of their family.
    """

    def __init__(self) -> None:
        self._timings: dict[str, list[float]] = {}
        self._timed: dict[str, dict[int, Shape]] = {}  # by family and size

    def add(self, one: Shape, steps: float) -> None:
        """A shape may be timed several times."""
        self._timings.setdefault(one.name, []).append(steps)
        self._timed.setdefault(one.family, {})[one.size] = one

    def times(self, one: Shape) -> int:
        """How often it was timed."""
        return len(self._timings.get(one.name, []))

    def steps(self, one: Shape) -> float:
        if self.times(one):
            return statistics.fmean(self._timings[one.name])
        return self._base(one) + self._offset(one.family)

    def _ladder(self, family: str) -> list[Shape]:
        return [one for _, one in sorted(self._timed[family].items())]

    def _base(self, one: Shape) -> float:
        chain = one.family.startswith("chain")
        ladder = self._ladder("chain" if chain else _laddered(self._timed))
        draft_pass = 0.0 if chain else self._draft_pass()
        steps = [self.steps(other) - draft_pass * other.tree.depth for other in ladder]
        sizes = [other.size for other in ladder]
        flat = np.interp(one.size, sizes, np.maximum.accumulate(steps))
        return float(flat) + draft_pass * one.tree.depth

    def _draft_pass(self) -> float:
        """Solved from two slopes: a longer chain has a pass more for each node, a tree fewer."""
        chains, trees = self._ladder("chain"), self._ladder(_laddered(self._timed))
        rise, nodes, passes = (
            [of(ladder[-1]) - of(ladder[0]) for ladder in (chains, trees)]
            for of in (self.steps, lambda one: one.size, lambda one: one.tree.depth)
        )
        if nodes[0] == 0 or nodes[1] == passes[1]:
            return 0.0
        both = rise[0] / nodes[0]  # a node and a pass
        return max(0.0, (nodes[1] * both - rise[1]) / (nodes[1] - passes[1]))

    def _offset(self, family: str) -> float:
        """Of this family; of none measured, what copied tokens add to the others."""
        if family in ("chain", _laddered(self._timed)):
            return 0.0
        like = [family] if family in self._timed or "+" not in family else self._timed
        above = [
            self.steps(one) - self._base(one)
            for other in like
            if "+" in other or other == family
            for one in self._timed.get(other, {}).values()
        ]
        return statistics.fmean(above) if above else 0.0


def choose(
    steps: Callable[[Shape], float], found: list[Shape], tokens: dict[str, float]
) -> tuple[CostCurve, Shape]:
    """The shape of the most `tokens` a round over `steps` a round, timing as few as will do.

    It must have been timed twice: what seems best of many is often what was timed too well.
    """
    curve = CostCurve()
    for one in probes(found):
        curve.add(one, steps(one))

    def promise(one: Shape) -> float:
        return tokens[one.name] / curve.steps(one)

    for _ in range(MOST_TIMED):
        best = max(found, key=promise)
        if curve.times(best) > 1:
            break
        curve.add(best, steps(best))
    return curve, max((one for one in found if curve.times(one)), key=promise)


def probes(found: list[Shape]) -> list[Shape]:
    """What is timed first: some windows, some budgets of one kind of tree, one with copies."""
    families: dict[str, list[Shape]] = {}
    for one in sorted(found, key=lambda one: one.size):
        families.setdefault(one.family, []).append(one)
    copied = [one for name, family in families.items() if "+" in name for one in family]
    chosen = [
        family[i]
        for family in (families["chain"], families[_laddered(families)])
        for i in sorted({0, len(family) // 2, len(family) - 1})
    ]
    copied = sorted(copied, key=lambda one: abs(one.size - 16))[:1]
    return list(dict.fromkeys(chosen + copied))


def _laddered(families: Iterable[str]) -> str:
    """The kind that is timed at several sizes: a tree, unless no budget fits the draft's depth."""
    return next(kind for kind in ("dynamic", "static", "chain") if kind in families)

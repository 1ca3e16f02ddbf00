"""Cost of a round on this device, in steps of autoregressive decoding.

Decoders are timed as they run in use and alternate with the autoregressive one, so that a drifting clock or another
process largely cancels. Candidates that were not timed are interpolated within their family, monotonically in size.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from subprocess import SubprocessError

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder
from infer.engine.requests import Generation
from infer.measure.bench import bind_decoders, decode_in_turns, decode_prompts
from infer.results.metrics import sum_by_question
from infer.results.records import AUTOREGRESSIVE, PromptResult
from infer.tuning.candidates import LOOKUP, TreeCandidate
from infer.tuning.config import TuneConf
from models.drafts.base import Draft
from models.io.console import print_line, track_progress
from models.io.errors import drop_frames, first_line
from models.parallel.processes import share_from_main
from models.targets.target import Target
from models.trees.tree import NO_TREE

# Of compilers and devices, or of the programs that they run.
COMPILER_ERRORS = (RuntimeError, OSError, SubprocessError)
TIMED_TURNS = 4  # alternating timings of a candidate and the baseline
MAX_EXTRA_TIMINGS = 12  # timings after the probes, until the predicted best was timed twice

# Returns the seconds of each round of a row that the decoder has decoded.
RoundSeconds = Callable[[Decoder, Generation], list[float]]


def read_clock(decoder: Decoder, generation: Generation) -> list[float]:
    """Return the seconds that were measured while the row was decoded.

    The processes of a split target take those of the main one, so that all choose the same tree; collective.
    """
    assert isinstance(decoder.target, Target)
    return share_from_main(generation.round_s) if decoder.target.processes > 1 else generation.round_s


@dataclass(kw_only=True)
class CostBench:
    """Decoders of one draft for one batch size and context, built and compiled on first use.

    `round_seconds` is what a round costs: what the clock says, or costs that are known. After `minutes` from its
    start it has no time for more shapes, nor for prompts that would take longer.
    """

    target: Target
    draft: Draft
    prompts: list[EvalPrompt]
    conf: TuneConf
    batch: int
    context: int
    round_seconds: RoundSeconds = read_clock
    decoders: dict[str, Decoder] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)
    minutes: float | None = None  # None: no limit
    failures: dict[str, Exception] = field(default_factory=dict)  # of candidates that did not compile, by name

    def has_time(self) -> bool:
        """Return whether there is time for more; collective, and the same on all processes of a split target."""
        if self.minutes is None:
            return True
        passed = time.monotonic() - self.start
        return (share_from_main(passed) if self.target.processes > 1 else passed) < 60 * self.minutes

    def compile_in_time(self, candidates: list[TreeCandidate]) -> list[TreeCandidate]:
        """Build the decoders of candidates, at least of the first, while there is time; return those candidates.

        A shape that cannot be compiled is left out, with a line; of a split target it ends all processes alike.
        """
        self.decoder_for(None)
        ready: list[TreeCandidate] = []
        failure: Exception | None = None
        for count, candidate in enumerate(candidates):
            if ready and not self.has_time():
                print_line(f"{self.minutes:g} minutes are up after {count} of {len(candidates)} shapes")
                break
            failure = self.try_compile(candidate)
            ready += [] if failure else [candidate]
        if failure and not ready:
            raise failure
        return ready

    def try_compile(self, candidate: TreeCandidate) -> Exception | None:
        """Build the decoder of a candidate; return the error, with a line, of a compiler or of too little memory."""
        if candidate.name in self.failures:
            return self.failures[candidate.name]
        try:
            self.decoder_for(candidate)
        except COMPILER_ERRORS as error:
            if self.target.processes > 1:
                raise
            self.decoders.pop(candidate.name, None)
            self.failures[candidate.name] = drop_frames(error)
            print_line(f"{candidate.name} is left out: {type(error).__name__}: {first_line(error)}")
            return error
        return None

    def decoder_for(self, candidate: TreeCandidate | None) -> Decoder:
        """Return the decoder of a candidate, or the autoregressive one for None.

        Its first call builds and compiles it. What is compiled is printed.
        """
        name = candidate.name if candidate else AUTOREGRESSIVE
        if name not in self.decoders:
            if self.target.device.compiles:
                print_line(f"batch {self.batch}, context {self.context}: compiling {name}")
            draft, tree = (candidate.choose_draft(self.draft), candidate.tree) if candidate else (None, NO_TREE)
            sampling, layers = self.conf.sampling, self.draft.needs.layers
            decoder = self.decoders[name] = Decoder(
                self.target, draft, tree, sampling=sampling, slots=self.context, batch=self.batch, layers=layers
            )
            if self.conf.context is not None:  # of answers longer than these, whose rounds read all of the cache
                decoder.session.reads_views = False
            # one prompt more than rows, so that the refill of a row is compiled too
            self._decode_fully(decoder, (self.prompts * (self.batch + 1))[: self.batch + 1])
        return self.decoders[name]

    def _decode_fully(self, decoder: Decoder, prompts: list[EvalPrompt]) -> list[Generation]:
        return decode_prompts(decoder, prompts, max_new_tokens=self.conf.max_new_tokens, stops_at_eos=False)

    def measure_steps(self, candidate: TreeCandidate) -> float:
        """Return the cost of a round in autoregressive steps: the median of several turns."""
        baseline, speculative = self.decoder_for(None), self.decoder_for(candidate)
        turns = []
        for _ in range(TIMED_TURNS):
            step_before, round_s, step_after = map(self._median_round_s, (baseline, speculative, baseline))
            turns.append(2 * round_s / (step_before + step_after))
        return statistics.median(turns)

    def _median_round_s(self, decoder: Decoder) -> float:
        """Return the median time of a round in seconds, of the row with the most rounds.

        Shapes are static, so the choice of prompts and the ends of answers do not matter.
        """
        rows = self._decode_fully(decoder, self.prompts[: self.batch])
        return statistics.median(max((self.round_seconds(decoder, row) for row in rows), key=len))

    def benchmark_trees(self, candidates: list[TreeCandidate]) -> dict[str, Float[ndarray, "prompts tokens_seconds"]]:
        """Return tokens and seconds of every prompt, by mode; the modes decode in turns.

        The seconds of a prompt are its row's share of each round. A round takes the same time with idle rows, so this
        is the speed of a busy machine even while the last prompts leave rows idle. At batch size 1 the modes alternate
        prompt by prompt. A larger batch decodes all prompts in a long turn: there each candidate has turns of the
        target alone before and behind its own, which tell how fast the machine was then.
        """
        if self.batch == 1:
            return self._decode_in_turns(candidates, [[prompt] for prompt in self.prompts])
        pairs = {c.name: self._decode_in_turns([c], [self.prompts]) for c in candidates}
        plain = np.mean([pair[AUTOREGRESSIVE] for pair in pairs.values()], 0)
        seconds = plain[:, 1].sum() or 1.0  # no answer may have taken a round
        slowness = {name: pair[AUTOREGRESSIVE][:, 1].sum() / seconds or 1.0 for name, pair in pairs.items()}
        return {AUTOREGRESSIVE: plain} | {name: pair[name] / [1, slowness[name]] for name, pair in pairs.items()}

    def _decode_in_turns(
        self, candidates: list[TreeCandidate], groups: list[list[EvalPrompt]]
    ) -> dict[str, Float[ndarray, "prompts tokens_seconds"]]:
        decoders = {AUTOREGRESSIVE: self.decoder_for(None)} | {c.name: self.decoder_for(c) for c in candidates}
        turns = [group for group in groups for _ in range(self.conf.repeats)]
        modes = bind_decoders(decoders, max_new_tokens=self.conf.max_new_tokens)
        results = decode_in_turns(modes, turns, "measuring the choice", has_time=self.has_time)
        return {name: self._sum_by_prompt(decoder, results[name]) for name, decoder in decoders.items()}

    def _sum_by_prompt(self, decoder: Decoder, results: list[PromptResult]) -> Float[ndarray, "prompts tokens_seconds"]:
        """Return the tokens that rounds added to each prompt's answers, and its share of time."""
        rows = [[r.generation.decoded_tokens, sum(self.round_seconds(decoder, r.generation))] for r in results]
        sums = sum_by_question(np.array(rows, float), [result.prompt.id for result in results])
        return sums / [1, self.batch]


class CostCurve:
    """The cost of a round by candidate, in steps: measured, or interpolated by nodes and depth.

    Chains are interpolated between measured chains. Trees are interpolated between measured trees
    of other sizes, adjusted for their depth by the cost of a draft pass, which is estimated from
    chains, and shifted by the mean residual of their family.
    """

    def __init__(self) -> None:
        self._timings: dict[TreeCandidate, list[float]] = {}

    def add(self, candidate: TreeCandidate, steps: float) -> None:
        """Add a timing of a candidate; several timings are averaged."""
        self._timings.setdefault(candidate, []).append(steps)

    def num_timings(self, candidate: TreeCandidate) -> int:
        return len(self._timings.get(candidate, []))

    def steps(self, candidate: TreeCandidate) -> float:
        """Return the steps of a round with a candidate, measured or interpolated."""
        if self.num_timings(candidate):
            return statistics.fmean(self._timings[candidate])
        return self._interpolate(candidate) + self._family_offset(candidate.family)

    @property
    def _probed_family(self) -> str:
        return find_probed_family({candidate.family for candidate in self._timings})

    def _timed_candidates(self, family: str) -> list[TreeCandidate]:
        """Return the timed candidates of a family, ordered by size."""
        timed = [candidate for candidate in self._timings if candidate.family == family]
        return sorted(timed, key=lambda candidate: candidate.size)

    def _interpolate(self, candidate: TreeCandidate) -> float:
        is_chain = candidate.family.startswith("chain")
        timed = self._timed_candidates("chain" if is_chain else self._probed_family)
        draft_pass = 0.0 if is_chain else self._draft_pass_steps()
        steps = [self.steps(other) - draft_pass * other.tree.depth for other in timed]
        sizes = [other.size for other in timed]
        without_passes = np.interp(candidate.size, sizes, np.maximum.accumulate(steps))
        return float(without_passes) + draft_pass * candidate.tree.depth

    def _draft_pass_steps(self) -> float:
        """Estimate the cost of a draft pass from the slopes of chains and trees.

        A chain needs one more pass for each node, a tree fewer.
        """
        chains, trees = map(self._timed_candidates, ("chain", self._probed_family))
        rise, nodes, passes = (
            [measure(timed[-1]) - measure(timed[0]) for timed in (chains, trees)]
            for measure in (self.steps, lambda c: c.size, lambda c: c.tree.depth)
        )
        if nodes[0] == 0 or nodes[1] == passes[1]:
            return 0.0
        node_and_pass = rise[0] / nodes[0]
        return max(0.0, (nodes[1] * node_and_pass - rise[1]) / (nodes[1] - passes[1]))

    def _family_offset(self, family: str) -> float:
        """Return the mean residual of a family; one with copies that was not timed gets that of all with copies."""
        if family in ("chain", self._probed_family):
            return 0.0
        similar = self._timed_candidates(family) or [
            candidate for candidate in self._timings if "+" in family and "+" in candidate.family
        ]
        residuals = [self.steps(candidate) - self._interpolate(candidate) for candidate in similar]
        return statistics.fmean(residuals) if residuals else 0.0


def choose_candidate(
    measure_steps: Callable[[TreeCandidate], float],
    candidates: list[TreeCandidate],
    tokens: dict[str, float],
    *,
    probes: list[TreeCandidate] | None = None,
    has_time: Callable[[], bool] = lambda: True,
    try_compile: Callable[[TreeCandidate], Exception | None] = lambda _: None,
) -> tuple[CostCurve, TreeCandidate]:
    """Choose the candidate with the most `tokens` per step, with as few timings as possible.

    Return the cost curve and the candidate. If there is time, the choice is timed twice: the best of many timings is
    often one that was too fast by chance. `probes` are those that compile, by default all.
    """
    curve, candidates = CostCurve(), [*candidates]
    for number, candidate in enumerate(track_progress(probes or select_probes(candidates), "timing trees")):
        if number and not has_time():
            break
        curve.add(candidate, measure_steps(candidate))

    def predicted_speedup(candidate: TreeCandidate) -> float:
        return tokens[candidate.name] / curve.steps(candidate)

    for _ in range(MAX_EXTRA_TIMINGS):
        if not has_time():  # first: without all probes the others cannot be predicted
            break
        best = max(candidates, key=predicted_speedup)
        if curve.num_timings(best) > 1:
            break
        if try_compile(best):
            candidates.remove(best)
        else:
            curve.add(best, measure_steps(best))
    return curve, max((c for c in candidates if curve.num_timings(c)), key=predicted_speedup)


def select_probes(candidates: list[TreeCandidate]) -> list[TreeCandidate]:
    """Select the candidates timed first: a few windows and trees, one with copies, and all windows of lookup alone."""
    families: dict[str, list[TreeCandidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.size):
        families.setdefault(candidate.family, []).append(candidate)
    copied = (candidate for name, family in families.items() if "+" in name for candidate in family)
    probes = [
        family[i]
        for family in (families["chain"], families[find_probed_family(families)])
        for i in sorted({0, len(family) // 2, len(family) - 1})
    ]
    # The probe with copies is the one nearest to 16 nodes, a medium size.
    probes += sorted(copied, key=lambda candidate: abs(candidate.size - 16))[:1]
    return list(dict.fromkeys(probes + families.get(LOOKUP, [])))


def find_probed_family(families: Iterable[str]) -> str:
    """Return the family timed at several sizes: trees, or chains if no budget fits the depth."""
    return next(kind for kind in ("dynamic", "static", "chain") if kind in families)

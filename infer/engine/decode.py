"""The decoding loop: continuous batching of prompts over the rows of a session.

Requests are admitted to free rows (infer/engine/admission.py), then all rows go through rounds together
(infer/engine/session.py). Autoregressive decoding is the same loop with an empty tree.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from infer.engine.admission import admit_requests, count_admissible, pad_and_start
from infer.engine.phase_timer import PhaseTimer
from infer.engine.requests import Generation, Request, StopCriteria
from infer.engine.session import Session
from infer.engine.steps import Program
from infer.verify.base import AcceptanceRule
from infer.verify.config import Verification
from infer.verify.greedy_and_coupled import CoupledRule, GreedyRule, TypicalRule
from infer.verify.rejection_and_block import BlockRule, RejectionRule
from models.drafts.base import Draft
from models.drafts.ngram import MixedDraft
from models.io.errors import require
from models.targets.language_model import LanguageModel
from models.targets.target import Target
from models.trees.keyed_noise import require_equal_noise
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, Tree

# Returns at most the given number of waiting requests, and removes them from the queue.
TakeRequests = Callable[[int], list[Request]]
OnTokens = Callable[[Request], None]


def ignore_tokens(request: Request) -> None:
    """Take a request's new tokens as they come: nothing reads them before the request ends."""


class Decoder:
    """A target, with a draft and a tree or alone, that decodes any number of prompts.

    At most `batch` are decoded at a time, each in a row of `slots` tokens: the next prompt takes
    the row of a finished one.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: Draft | None = None,
        tree: Tree = NO_TREE,
        *,
        sampling: SamplingConf,
        slots: int,
        batch: int = 1,
        layers: list[int] | None = None,
        acceptance_rule: AcceptanceRule | None = None,
    ):
        """Check that draft, tree and rule fit; without a rule, take the one that is exact.

        `layers` of the target are captured, by default those that the draft needs. An evaluation gives
        its modes without a draft those of a draft, to share its graphs and to cost the same.
        """
        max_depth = draft.max_depth if draft else 0
        require(
            draft is None or tree.depth <= max_depth,
            f"tree.depth: must be at most the {max_depth} tokens that the draft can propose, got "
            f"{tree.depth}; take tree=chain tree.depth={max_depth}",
        )
        vocabulary = target.vocab_size if draft is None or draft.kept_ids is None else len(draft.kept_ids)
        require(
            draft is None or tree.width <= vocabulary,
            f"tree: must take at most the {vocabulary} tokens of the draft as children of a node, got {tree.width}; "
            "lower tree.children or the ranks of tree.paths",
        )
        rule = acceptance_rule or build_acceptance_rule(Verification.auto, sampling)
        rule.check(sampling, tree)
        require_equal_noise(sampling, target.device)
        if draft is not None and tree.ngram_tokens:
            draft = MixedDraft(draft)
        self.target, self.draft, self.tree = target, draft, tree
        self.slots, self.batch = slots, batch
        self.program = Program(
            target=target,
            draft=draft,
            # A copy: a graph that reads a list which the draft holds too is compiled again for each draft.
            layers=list(layers or (draft.needs.layers if draft else [])),
            tree=tree,
            sampling=sampling,
            acceptance_rule=rule,
            vocab_size=target.vocab_size,
        )
        self.session = Session(self.program, slots=slots, batch=batch)

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[list[int]],
        *,
        row_ids: Sequence[int],
        max_new_tokens: int | Sequence[int],
        eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        logits_out: list[Tensor] | None = None,
        phase_timer: PhaseTimer | None = None,
        on_tokens: OnTokens = ignore_tokens,
    ) -> list[Generation]:
        """Return one generation per prompt, in order, decoding at most `self.batch` at a time.

        An answer ends at `max_new_tokens`, after an EOS token, or after the token that completes one of the `stop`
        strings, whichever comes first; with `eos_ids` None, no token is an EOS. `row_ids` key the noise of each prompt.
        `logits_out`, which needs batch 1, is extended by the target's logits after each token. With `phase_timer`,
        rounds run unfused so that each phase can be timed. `on_tokens` is called with each request that has new tokens.
        """
        requests = list(self._make_requests(prompts, row_ids, max_new_tokens))
        waiting = iter(requests)
        finished = self.stream(
            lambda count: list(islice(waiting, count)),
            eos_ids=eos_ids,
            stop=stop,
            logits_out=logits_out,
            phase_timer=phase_timer,
            on_tokens=on_tokens,
        )
        deque(finished, maxlen=0)  # runs the stream to its end; `requests` hold the generations
        return [request.generation for request in requests]

    @torch.no_grad()
    def stream(
        self,
        take: TakeRequests,
        *,
        min_free_rows: int = 1,
        eos_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        logits_out: list[Tensor] | None = None,
        phase_timer: PhaseTimer | None = None,
        on_tokens: OnTokens = ignore_tokens,
    ) -> Iterator[Request]:
        """Yield each request that `take` returns when it is finished, until no request is left.

        `take` is called before every round with the most prompts to prefill, again until it returns none;
        the prompts must fit in the slots. With dynamic shapes that number is 0 until `min_free_rows` rows
        are free, so that several prompts share a prefill pass. The other arguments are those of `decode`.
        """
        criteria = StopCriteria(
            eos_ids=frozenset(eos_ids or []), stop_strings=tuple(stop), detokenize=self._detokenize if stop else None
        )
        session, state = self.session, None
        running: dict[int, Request] = {}
        while True:
            while requests := take(count_admissible(session, len(running), min_free_rows)):
                state = admit_requests(session, state, requests, running, criteria)
                for request in requests:
                    on_tokens(request)
                yield from (request for request in requests if request.finished)
            if state is None or not running:
                return
            start = time.perf_counter()
            if phase_timer is not None:
                phase_timer.start_round()
            state.rows.active = torch.tensor(
                [row in running for row in range(self.batch)], device=session.device.torch_device
            )
            longest = max(len(request.ids) + len(request.generation.ids) for request in running.values())
            state, output = session.run_round(state, phase_timer and phase_timer.end_phase, longest=longest)
            host_rows = output.ids_and_count.tolist()  # the only read of the round
            round_s = time.perf_counter() - start
            if logits_out is not None:
                *_, count = host_rows[0]
                logits_out.append(output.logits[0].cpu()[:count])
            advanced = self._distribute_tokens(host_rows, round_s, running, criteria)
            if phase_timer is not None:
                phase_timer.end_phase("host")
                phase_timer.finish_round()
            for request in advanced:
                on_tokens(request)
            yield from (request for request in advanced if request.finished)

    @torch.no_grad()
    def force_tokens(self, prompt: list[int], row_id: int, ids: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the target's logits and scores for each of `ids`, decoded one token at a time.

        Scores are the warped logits, plus noise if the target samples; their argmax is the token
        that the target chooses. The decoder must have one row and no draft.
        """
        (request,) = self._make_requests([prompt], [row_id], len(ids))
        state, logits, scores = pad_and_start(self.session, [request.ids], [request.row_id])
        yield logits[0], scores[0]
        for number, token in enumerate(ids[:-1], 1):
            state.rows.root = torch.full_like(state.rows.root, token)
            state, output = self.session.run_round(state, longest=len(request.ids) + number)
            yield output.logits[0, 0].clone(), output.scores[0, 0].clone()

    def _distribute_tokens(
        self, host_rows: list[list[int]], round_s: float, running: dict[int, Request], criteria: StopCriteria
    ) -> list[Request]:
        """Append a round's tokens to all running requests; return these, and drop finished ones."""
        active = list(running.items())
        for row, request in active:
            *tokens, count = host_rows[row]
            request.generation.add_round(
                tokens[:count], drafted=self.tree.size, round_s=round_s, active_rows=len(active)
            )
            request.truncate_if_finished(criteria, num_new=count)
            if request.finished:
                del running[row]
        return [request for _, request in active]

    def _make_requests(
        self, prompts: Sequence[list[int]], row_ids: Sequence[int], limits: int | Sequence[int]
    ) -> Iterator[Request]:
        """Yield one request per prompt; raise UserError if a prompt is empty or does not fit."""
        prompt_limits = [limits] * len(prompts) if isinstance(limits, int) else limits
        for index, (ids, row_id, limit) in enumerate(zip(prompts, row_ids, prompt_limits, strict=True)):
            require(
                len(ids) > 0,
                f"evaluation.prompts: every prompt needs a token, got none for number {index}; begin it with BOS",
            )
            require(
                len(ids) + limit <= self.slots,
                f"evaluation.max_new_tokens: prompt and answer must fit in {self.slots} tokens, "
                f"got {len(ids)} + {limit}; shorten the prompts",
            )
            yield Request(ids=ids, row_id=row_id, max_new_tokens=limit)

    def _detokenize(self, ids: list[int]) -> str:
        assert isinstance(self.target, Target)
        return self.target.tokenizer.decode(ids)


def build_acceptance_rule(
    verification: Verification, sampling: SamplingConf, *, typical: TypicalRule | None = None
) -> AcceptanceRule:
    """Return the rule that `verification` names; raise UserError if it does not fit `sampling`.

    `typical` has the thresholds of the typical rule.

    >>> build_acceptance_rule(Verification.auto, SamplingConf(temperature=0.7)).name
    'coupled'
    """
    rules = (GreedyRule(), CoupledRule(), RejectionRule(), BlockRule(), typical or TypicalRule())
    (rule,) = (rule for rule in rules if rule.verification is verification.resolve(sampling))
    rule.check(sampling)
    return rule

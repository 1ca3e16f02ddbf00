"""Sampling of tokens: target and draft share one rule and one source of noise.

A token is the argmax of the warped logits plus Gumbel noise, which samples their softmax exactly.
The noise is a function of (seed, row id, round start, place, token) only (keyed_noise.py). Where all
rounds share it, the place is the token's position and the round start 0; else the place is a level or
a node and the start the row's length. See docs/exactness.md and https://arxiv.org/abs/2408.07978.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.operators import DROPPED_SCORE, drop_tail, mark_tokens, topk_rows
from models.trees.sampling_config import SamplingConf


@dataclass(kw_only=True)
class History:
    """The sets of tokens in the texts so far, which the penalties depend on."""

    in_text: Bool[Tensor, "*rows vocab"]  # in prompt or answer
    in_answer: Bool[Tensor, "*rows vocab"]  # in the answer

    @classmethod
    def from_prompts(
        cls, input_ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"], vocab: int
    ) -> "History":
        """Build the history of prompts of `lengths` tokens, without answers."""
        is_prompt = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        in_prompt = mark_tokens(input_ids, is_prompt, vocab)
        return cls(in_text=in_prompt, in_answer=torch.zeros_like(in_prompt))

    def on_path(
        self, node_ids: Int[Tensor, "batch verified"], ancestors: Bool[Tensor, "batch verified verified"]
    ) -> "History":
        """Return the histories of the texts that end in the root and each node: [batch, verified, vocab]."""
        on_path = mark_tokens(node_ids[:, None].expand_as(ancestors), ancestors, self.in_text.shape[-1])
        return History(in_text=self.in_text[:, None] | on_path, in_answer=self.in_answer[:, None] | on_path)

    def add(self, input_ids: Int[Tensor, "batch path"], count: Int[Tensor, " batch"]) -> "History":
        """Return the history extended by the first `count` of `input_ids`."""
        is_emitted = torch.arange(input_ids.shape[1], device=input_ids.device) < count[:, None]
        is_new = mark_tokens(input_ids, is_emitted, self.in_text.shape[-1])
        return History(in_text=self.in_text | is_new, in_answer=self.in_answer | is_new)


def warp_logits(
    rule: SamplingConf, logits: Float[Tensor, "*rows vocab"], history: History | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return logits after penalties, temperature, top-k, top-p and min-p, in this order.

    The order is that of transformers; the presence penalty, which that lacks, follows the repetition
    penalty as in vLLM. A token of logit -inf is never sampled. A greedy rule applies only the
    penalties, because no other step changes which token is likeliest.
    """
    scores = apply_penalties(rule, logits.float(), history)
    if rule.is_greedy:
        return scores
    scores = scores / rule.temperature
    if rule.top_k:
        threshold = topk_rows(scores, min(rule.top_k, scores.shape[-1]))[0][..., -1:]
        scores = scores.masked_fill(scores < threshold, DROPPED_SCORE)
    if rule.top_p < 1:
        scores = drop_tail(scores, 1 - rule.top_p)
    if rule.min_p:
        probs = scores.softmax(-1)
        unlikely = probs < rule.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(unlikely, DROPPED_SCORE)
    return scores


def drop_margins(rule: SamplingConf, scores: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Return by how much two scores must approach each other for each token to be dropped.

    For a dropped token it is negative: minus the approach after which it would be kept.
    `scores` are penalized logits over the temperature. If rounding may move scores by that
    much, top-k, top-p and min-p may keep a different set of tokens.

    >>> rule = SamplingConf(temperature=1.0, top_k=2)
    >>> drop_margins(rule, torch.tensor([4.0, 1.0, 2.5]))
    tensor([ 3.0000, -1.5000,  1.5000])
    """
    margin = torch.full_like(scores, math.inf)
    if rule.is_greedy:
        return margin
    ordered, order = scores.sort(descending=True)
    num_top_k = min(rule.top_k or len(scores), len(scores))
    by_rank = _cutoff_distances(ordered, num_top_k)
    if rule.top_p < 1:
        probs = ordered[:num_top_k].double().softmax(-1)
        # the mass of the likelier tokens
        mass = torch.cat([probs.new_zeros(1), probs.cumsum(0)[:-1].clamp_max(1.0)])
        num_top_p = int((mass < rule.top_p).sum())
        # Either the odds of the likelier tokens change, or the token changes ranks with others.
        odds = (math.log(rule.top_p / (1 - rule.top_p)) - mass.logit()).to(scores.dtype)
        odds = torch.cat([odds, odds[-1:].expand(len(scores) - num_top_k)])
        ranks = _cutoff_distances(ordered, num_top_p)
        closer = [odds[:num_top_p].minimum(ranks[:num_top_p]), odds[num_top_p:].maximum(ranks[num_top_p:])]
        by_rank = by_rank.minimum(torch.cat(closer))
    margin[order] = by_rank
    if rule.min_p:
        margin = margin.minimum(scores - scores.max() - math.log(rule.min_p))
    return margin


def apply_penalties(
    rule: SamplingConf, scores: Float[Tensor, "*rows vocab"], history: History | None
) -> Float[Tensor, "*rows vocab"]:
    """Return scores after the repetition penalty and the presence penalty."""
    if not rule.has_penalties or history is None:
        return scores
    penalty = rule.repetition_penalty
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(history.in_text, penalized, scores) - (rule.presence_penalty * history.in_answer)


def _cutoff_distances(ordered: Float[Tensor, " vocab"], num_kept: int) -> Float[Tensor, " vocab"]:
    """Return the difference of each score from the nearest on the other side of the cutoff.

    It is positive for the first `num_kept` scores and negative for the others. `ordered` is in
    descending order. If all scores are kept, nothing is on the other side: the difference is inf.
    """
    ends = torch.cat([ordered, ordered.new_tensor([-math.inf])])
    return torch.cat([ordered[:num_kept] - ends[num_kept], ordered[num_kept:] - ends[num_kept - 1]])


@dataclass(kw_only=True)
class Sampler:
    """The ranking of a draft's candidates in one round, by the target's rule and a source of noise.

    With the target's noise both models tend to choose the same token (coupled). With `draws` the noise is the draft's,
    so children are drawn without replacement (the largest perturbed log-probabilities: Kool et al., arXiv 1903.06059)
    and the distributions that they were drawn from are recorded. Without noise candidates are ranked by probability.
    """

    rule: SamplingConf
    noise: Float[Tensor, "batch lookahead vocab"] | None = None  # of the positions after the root
    history: History | None = None  # of each row up to its root
    draws: bool = False

    def score_candidates(
        self, logits: Float[Tensor, "batch nodes draft_vocab"], level: int, kept_ids: Int[Tensor, " draft_vocab"] | None
    ) -> tuple[Float[Tensor, "batch nodes draft_vocab"], Float[Tensor, "batch nodes draft_vocab"]]:
        """Return logits warped by the rule, with the history of each row's root, and the same with noise.

        The noise is that of the position `level + 1` after the root.
        """

        def take_kept(values: Tensor) -> Tensor:
            return (values if kept_ids is None else values[:, kept_ids])[:, None]

        history = self.history and History(
            in_text=take_kept(self.history.in_text), in_answer=take_kept(self.history.in_answer)
        )
        warped = warp_logits(self.rule, logits, history)
        return warped, warped if self.noise is None else warped + take_kept(self.noise[:, level])

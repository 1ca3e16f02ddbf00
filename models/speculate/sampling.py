"""How tokens are sampled: one rule, and one source of noise, for target and draft alike.

A token is the argmax of the warped logits plus Gumbel noise, which samples their softmax exactly.
The noise is a function of (seed, row id, turn, position, token) alone. Target and draft add the
same noise, so that they tend to choose the same token, and the output depends on the target and the
key but not on what was drafted: https://arxiv.org/abs/2408.07978.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from models.errors import UserError

MASK = 0xFFFFFFFF


@dataclass(kw_only=True)
class SamplingConf:
    """Temperature 0 takes the likeliest token; the other defaults change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least share of the likeliest token's probability
    repetition_penalty: float = 1.0  # divides the logits of what prompt and answer hold
    presence_penalty: float = 0.0  # is taken from the logits of what the answer holds
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"sampling.temperature: must not be negative, got {self.temperature}; "
                "0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(
                f"sampling.top_k: must not be negative, got {self.top_k}; 0 keeps every token"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"sampling.top_p: must be in (0, 1], got {self.top_p}; 1 keeps every token"
            )
        if not 0 <= self.min_p <= 1:
            raise UserError(
                f"sampling.min_p: must be in [0, 1], got {self.min_p}; 0 keeps every token"
            )
        if self.repetition_penalty <= 0:
            raise UserError(
                "sampling.repetition_penalty: must be above 0, "
                f"got {self.repetition_penalty}; 1 penalises nothing"
            )

    def build(self) -> "SamplingRule":
        return SamplingRule(self)


@dataclass(kw_only=True)
class History:
    """Which tokens stand in a text: what the penalties look at."""

    known: Bool[Tensor, "*rows vocab"]  # in prompt or answer
    said: Bool[Tensor, "*rows vocab"]  # in the answer

    @classmethod
    def of(
        cls, ids: Int[Tensor, "batch prompt"], lengths: Int[Tensor, " batch"], vocab: int
    ) -> "History":
        """Of prompts alone, each of `lengths` tokens."""
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        counts = torch.zeros(len(ids), vocab, dtype=torch.int64, device=ids.device)
        known = counts.scatter_add(1, ids, inside.long()) > 0
        return cls(known=known, said=torch.zeros_like(known))

    def along(
        self, ids: Int[Tensor, "batch nodes"], sees: Bool[Tensor, "batch nodes nodes"]
    ) -> "History":
        """Of a text a row, the texts that end in each node of its tree: [batch, nodes, vocab]."""
        here = one_hot(ids, self.known.shape[-1]).float()
        path = sees.float() @ here > 0
        return History(known=self.known[:, None] | path, said=self.said[:, None] | path)

    def add(self, ids: Int[Tensor, "batch path"], count: Int[Tensor, " batch"]) -> "History":
        """With the first `count` of `ids`."""
        said = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
        new = (one_hot(ids, self.known.shape[-1]).bool() & said[:, :, None]).any(1)
        return History(known=self.known | new, said=self.said | new)


class SamplingRule:
    """What is done to logits before a token is chosen."""

    def __init__(self, conf: SamplingConf):
        self.conf = conf
        self.seed = conf.seed
        self.greedy = conf.temperature == 0
        self.penalises = conf.repetition_penalty != 1 or conf.presence_penalty != 0

    @property
    def graph_key(self) -> str:
        """What graphs depend on: models/device/graph_budget.py."""
        return str(self.conf)

    def warp(
        self, logits: Float[Tensor, "*rows vocab"], history: History | None = None
    ) -> Float[Tensor, "*rows vocab"]:
        """Penalties, temperature, top-k, top-p, min-p, as in transformers; -inf is never sampled.

        transformers has no presence penalty; ours is OpenAI's, and stands where vLLM has it, behind
        the repetition penalty. A greedy rule stops there: no warping changes which token is
        likeliest.
        """
        scores = self.penalised(logits.float(), history)
        if self.greedy:
            return scores
        scores = scores / self.conf.temperature
        if self.conf.top_k:
            least = scores.topk(min(self.conf.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.conf.top_p < 1:
            ordered, order = scores.sort(dim=-1)
            unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - self.conf.top_p
            unlikely[..., -1] = False  # the likeliest token always stays
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), -math.inf)
        if self.conf.min_p:
            probs = scores.softmax(-1)
            unlikely = probs < self.conf.min_p * probs.amax(-1, keepdim=True)
            scores = scores.masked_fill(unlikely, -math.inf)
        return scores

    def margins(self, scores: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """How much nearer two scores must come for a token to be dropped; below 0, to be kept.

        `scores` are penalized logits over the temperature. Where rounding may move scores by so
        much, top-k, top-p and min-p may keep another set of tokens.

        >>> rule = SamplingConf(temperature=1.0, top_k=2).build()
        >>> rule.margins(torch.tensor([4.0, 1.0, 2.5]))
        tensor([ 3.0000, -1.5000,  1.5000])
        """
        conf = self.conf
        margin = torch.full_like(scores, math.inf)
        if self.greedy:
            return margin
        ordered, order = scores.sort(descending=True)
        most = min(conf.top_k or len(scores), len(scores))
        by_rank = _distances(ordered, most)
        if conf.top_p < 1:
            probs = ordered[:most].double().softmax(-1)
            before = torch.cat([probs.new_zeros(1), probs.cumsum(0)[:-1]])  # of likelier tokens
            before = before.clamp_max(1.0)
            kept = int((before < conf.top_p).sum())
            # Either the odds of what is likelier change, or the token changes places with others.
            odds = (math.log(conf.top_p / (1 - conf.top_p)) - before.logit()).to(scores.dtype)
            odds = torch.cat([odds, odds[-1:].expand(len(scores) - most)])
            places = _distances(ordered, kept)
            nearer = [odds[:kept].minimum(places[:kept]), odds[kept:].maximum(places[kept:])]
            by_rank = by_rank.minimum(torch.cat(nearer))
        margin[order] = by_rank
        if conf.min_p:
            margin = margin.minimum(scores - scores.max() - math.log(conf.min_p))
        return margin

    def penalised(
        self, scores: Float[Tensor, "*rows vocab"], history: History | None
    ) -> Float[Tensor, "*rows vocab"]:
        if not self.penalises or history is None:
            return scores
        penalty = self.conf.repetition_penalty
        less = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(history.known, less, scores) - (
            self.conf.presence_penalty * history.said
        )


def _distances(ordered: Float[Tensor, " vocab"], kept: int) -> Float[Tensor, " vocab"]:
    """How far the first `kept` stand above the first of the others, and these below the last."""
    ends = torch.cat([ordered, ordered.new_tensor([-math.inf])])
    return torch.cat([ordered[:kept] - ends[kept], ordered[kept:] - ends[kept - 1]])


@dataclass(kw_only=True)
class Sampler:
    """How a draft ranks its candidates in one round: by the target's rule, and by whose noise.

    With the target's own noise both tend to choose the same token (coupled). `draws`: the noise is
    the draft's own, so that children are drawn without replacement (the largest of perturbed
    log-probabilities: Kool et al., arXiv 1903.06059), and what they were drawn from is kept. None:
    by probability alone.
    """

    rule: SamplingRule
    noise: Float[Tensor, "batch ahead vocab"] | None = None  # of the positions behind the root
    history: History | None = None  # of each row up to its root
    draws: bool = False

    def warp(
        self, logits: Float[Tensor, "batch nodes draft_vocab"],
        kept_ids: Int[Tensor, " draft_vocab"] | None,
    ) -> Float[Tensor, "batch nodes draft_vocab"]:  # fmt: skip
        """Raw logits as sampling sees them."""
        if self.history is None:
            return self.rule.warp(logits)
        known, said = (
            part if kept_ids is None else part[:, kept_ids]
            for part in (self.history.known, self.history.said)
        )
        return self.rule.warp(logits, History(known=known[:, None], said=said[:, None]))

    def perturb(
        self, warped: Float[Tensor, "batch nodes draft_vocab"], level: int,
        kept_ids: Int[Tensor, " draft_vocab"] | None,
    ) -> Float[Tensor, "batch nodes draft_vocab"]:  # fmt: skip
        """Scores of the tokens `level + 1` positions behind the root."""
        if self.noise is None:
            return warped
        here = self.noise[:, level]
        return warped + (here if kept_ids is None else here[:, kept_ids])[:, None]


def gumbel(
    seed: int,
    row_ids: Int[Tensor, " batch"],
    turn: int | Int[Tensor, " batch"],
    positions: Int[Tensor, "batch positions"],
    vocab_ids: Int[Tensor, " vocab"],
) -> Float[Tensor, "batch positions vocab"]:
    """Standard Gumbel noise of these tokens at these positions: a hash, without any state.

    `vocab_ids` are target ids, so that a reduced draft vocabulary gets the target's own noise.
    """
    # The upper tail decides what is sampled. It is where `rest` is small, which fp32 resolves.
    rest = _uniform(seed, row_ids, turn, positions, vocab_ids)
    return -torch.log(-torch.log1p(-rest))


def uniform(
    seed: int,
    row_ids: Int[Tensor, " batch"],
    turn: int | Int[Tensor, " batch"],
    positions: Int[Tensor, "batch positions"],
) -> Float[Tensor, "batch positions"]:
    """Numbers in (0, 1), keyed as the noise is."""
    return _uniform(seed, row_ids, turn, positions, torch.zeros_like(positions[0, :1]))[..., 0]


def _uniform(
    seed: int, row_ids: Tensor, turn: int | Tensor, positions: Tensor, vocab_ids: Tensor
) -> Float[Tensor, "batch positions vocab"]:
    outer, inner = (
        _key(start, seed, row_ids, turn, positions)[..., None] for start in (0x9E3779B9, 0x85EBCA6B)
    )
    bits = _mix(outer ^ _mix(inner ^ (vocab_ids & MASK)))  # two keys of 32 bits: no collisions
    return ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)


def _key(
    start: int, seed: int, row_ids: Tensor, turn: int | Tensor, positions: Tensor
) -> Int[Tensor, "batch positions"]:
    key = torch.full_like(row_ids, start ^ (seed & MASK))
    for word in (seed >> 32, row_ids, row_ids >> 32, turn):
        key = _mix(key) + word & MASK
    return _mix(_mix(key)[:, None] + positions & MASK)


def _mix(bits: Tensor) -> Tensor:
    """An integer hash of 32 bits, bijective and without visible bias.

    Constants from https://github.com/skeeto/hash-prospector. Both are below 2^31, so that no
    product overflows int64: overflow is undefined in compiled code.
    """
    bits = bits ^ (bits >> 16)
    bits = bits * 0x21F0AAAD & MASK
    bits = bits ^ (bits >> 15)
    bits = bits * 0x735A2D97 & MASK
    return bits ^ (bits >> 15)

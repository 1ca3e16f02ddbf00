"""Is the output the target's own? Every emitted token is held against the one-token-at-a-time pass.

In fp32 the answers must be equal. In bf16 a pass over many tokens rounds differently from a pass
over one, so near-ties may fall the other way; how near is measured, and nothing beyond is allowed.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.prompts import EvalPrompt
from infer.decode import Decoder
from infer.stats import Divergence, Exactness, Trace

FARTHEST = torch.finfo(torch.float32).max  # a gap that no rounding explains; JSON has no infinity
MARGIN = 2.0  # times the 99.9th percentile of what rounding moves a logit
QUANTILE = 0.999

# emitted ids, and the target's logits behind each of them but the last
Recorded = tuple[Int[Tensor, " _"], Float[Tensor, "_ vocab"]]


def near_tie_gap(plain: list[Recorded], others: list[list[Recorded]]) -> float:
    """Gap of two logits that rounding may close: measured where modes read the same prefix."""
    moved = [
        (ours[:n] - theirs[:n]).abs().float().flatten()
        for mode in others
        for (ids, ours), (other_ids, theirs) in zip(plain, mode, strict=True)
        if (n := _shared(ids, other_ids))
    ]
    if not moved:
        return 0.0
    ordered = torch.cat(moved).sort().values
    return MARGIN * float(ordered[int(QUANTILE * (len(ordered) - 1))])


def _shared(ids: Tensor, other: Tensor) -> int:
    """Rows of logits with equal prefixes."""
    count = min(len(ids), len(other)) - 1
    equal = (ids[:count] == other[:count]).int().cumprod(0)
    return int(equal.sum())


def compare(
    decoder: Decoder, prompts: list[EvalPrompt], plain: list[Trace], traces: list[Trace], gap: float
) -> Exactness:
    """Every divergence of `traces` from the target, judged by `decoder`, the autoregressive one."""
    wanted = {trace.prompt_id: trace.ids for trace in plain}
    by_id = {prompt.id: prompt for prompt in prompts}
    found = []
    for trace in traces:
        if trace.ids != wanted[trace.prompt_id]:
            prompt = by_id[trace.prompt_id]
            found += [
                Divergence(prompt_id=prompt.id, position=position, logit_gap=short)
                for position, short in _divergences(decoder, prompt, trace.ids)
            ]
    exact = decoder.target.head.weight.dtype == torch.float32
    return Exactness(divergences=found, near_tie_gap=gap, exact_arithmetic=exact)


def _divergences(
    decoder: Decoder, prompt: EvalPrompt, ids: list[int]
) -> list[tuple[int, float]]:  # fmt: skip
    """(position, how many logits the target preferred its own token by), read one at a time.

    An answer of the target's own tokens alone that still differs has ended in the wrong place.
    """
    unit = decoder.plan.rule.conf.temperature or 1.0  # of the scores, in logits
    found = []
    for position, scores in enumerate(decoder.forced(prompt.ids, prompt.row_id, ids)):
        if int(scores.argmax()) != ids[position]:
            short = unit * float(scores.max() - scores[ids[position]])
            found.append((position, min(short, FARTHEST)))
    return found or [(len(ids), FARTHEST)]

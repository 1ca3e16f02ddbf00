"""Is the output the target's own? Every emitted token is held against the one-token-at-a-time pass.

In fp32 the answers must be equal. In a lower precision a pass over many tokens rounds differently
from a pass over one, so near-ties may fall the other way. How near is measured without trees and
without the runtime's masks, positions and cache: one-token passes against the model's own forward
pass over the same tokens (`Yardstick`). What the precision cannot explain is no yardstick.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder, bucket
from infer.engine.rounds import TARGET, seed_of
from infer.measure.records import Divergence, Exactness, Trace, Yardstick
from models.speculate.sampling import History, SamplingRule, gumbel
from models.target.language_model import Transformer

FARTHEST = torch.finfo(torch.float32).max  # a gap that no rounding explains; JSON has no infinity
MARGIN = 2.0  # a divergence lies between two logits, and rounding may move each of them
QUANTILE = 0.999
SUBLAYERS = 2  # of a layer: attention and MLP each round the residual stream once
MOST_TOKENS = 64  # of an answer that the gap is measured on: as many rows of logits are kept


def measure_yardstick(
    decoder: Decoder, prompts: Iterable[EvalPrompt], *, max_new_tokens: int
) -> Yardstick:
    """Decode some prompts one token at a time, and read the same tokens again plainly.

    `decoder` is the autoregressive one. Neither side knows trees, so that a wrong mask, position or
    cache move of theirs cannot widen the gap that they are judged by.
    """
    target = decoder.target
    moved, largest = [], 0.0
    for prompt in prompts:
        record: list[Tensor] = []
        (done,) = decoder.decode(
            [prompt.ids], row_ids=[prompt.row_id],
            max_new_tokens=min(MOST_TOKENS, max_new_tokens), record=record,
        )  # fmt: skip
        again = read_plainly(target, prompt.ids, done.ids, slots=decoder.slots)
        moved.append((torch.cat(record).float() - again).abs().flatten())
        largest = max(largest, float(again.abs().max()))
    return derive_yardstick(
        torch.cat(moved), largest=largest,
        layers=target.num_layers, width=target.hidden_size, dtype=target.head.weight.dtype,
    )  # fmt: skip


@torch.no_grad()
def read_plainly(
    target: Transformer, prompt: list[int], answer: list[int], *, slots: int
) -> Float[Tensor, "rows vocab"]:
    """Logits behind each token of the answer but the last, by one pass over prompt and answer.

    The answer has at most MOST_TOKENS tokens.

    It is transformers' own forward pass, with its own causal mask and positions and without a
    cache. Padding stands behind the text, where a causal mask hides it, and as many logits are read
    whatever the answer's length, so that texts of different lengths have few shapes.
    """
    text = [*prompt, *answer[:-1]]
    padded = torch.zeros(1, min(bucket(len(text)), slots), dtype=torch.int64)
    padded[0, : len(text)] = torch.tensor(text)
    rows = (len(prompt) + torch.arange(MOST_TOKENS)).clamp(max=padded.shape[1] - 1)
    place = target.device.torch_device
    hidden = target.decoder(input_ids=padded.to(place), use_cache=False).last_hidden_state
    logits = target.logits(hidden[0].index_select(0, rows.to(place)))
    return logits.cpu().float()[: len(answer) - 1]


def derive_yardstick(
    moved: Float[Tensor, " count"], *, largest: float, layers: int, width: int, dtype: torch.dtype
) -> Yardstick:
    """The gap that rounding may close, and the widest one that it explains.

    `moved` is by how much logits differ between the two ways of reading, `largest` the largest
    absolute logit. With eps the spacing of numbers behind 1 (2^-7 in bf16):

    * A logit is a rounded number, so two passes may differ by one step, eps * largest at most,
      even where nothing before it differed. The gap is never taken to be less.
    * A residual stream is rounded behind each of its 2 * layers sublayers. Each may fall one step
      apart, independently of the others, so the steps add up like a random walk, to
      sqrt(2 * layers) of them. Sums are accumulated in fp32: those of `width` terms in another
      order differ by sqrt(width) of its steps, which counts in fp32 alone.

    A router between experts is not covered: where it falls the other way, logits move by any
    amount. Such targets show a gap wider than explained.
    """
    step = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * width**0.5
    one = MARGIN * step * largest
    seen = moved.kthvalue(1 + int(QUANTILE * (len(moved) - 1))).values
    return Yardstick(
        near_tie_gap=max(MARGIN * float(seen), one),
        explained_gap=one * (SUBLAYERS * layers) ** 0.5,
        exact_arithmetic=dtype == torch.float32,
    )


def compare(
    decoder: Decoder, prompts: list[EvalPrompt], plain: list[Trace], traces: list[Trace],
    by: Yardstick,
) -> Exactness:  # fmt: skip
    """Every divergence of `traces` from the target, judged by `decoder`, the autoregressive one."""
    wanted = {trace.prompt_id: trace.ids for trace in plain}
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = {(trace.prompt_id, tuple(trace.ids)) for trace in traces}  # a prompt may have passes
    found = []
    for prompt_id, ids in sorted(answers):
        if list(ids) != wanted[prompt_id]:
            found += [
                Divergence(prompt_id=prompt_id, position=position, logit_gap=short)
                for position, short in _divergences(
                    decoder, by_id[prompt_id], list(ids), wanted[prompt_id]
                )
            ]
    return Exactness(divergences=found, yardstick=by)


def _divergences(
    decoder: Decoder, prompt: EvalPrompt, ids: list[int], wanted: list[int]
) -> list[tuple[int, float]]:  # fmt: skip
    """(position, how many logits the target preferred its own token by), read one at a time.

    An answer of the target's own tokens alone that differs from the `wanted` one has ended in the
    wrong place, or the target has answered differently twice: some devices add in any order.
    """
    found = []
    for position, (logits, scores) in enumerate(decoder.forced(prompt.ids, prompt.row_id, ids)):
        if int(scores.argmax()) != ids[position]:
            short = shortfall(decoder.plan.rule, logits, prompt, ids, position)
            found.append((position, min(short, FARTHEST)))
    if found:
        return found
    pairs = zip(ids, wanted, strict=False)
    otherwise = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    return [(len(ids), FARTHEST)] if otherwise is None else [(otherwise, 0.0)]


def shortfall(
    rule: SamplingRule, logits: Float[Tensor, " vocab"], prompt: EvalPrompt, ids: list[int],
    position: int,
) -> float:  # fmt: skip
    """By how much two logits must come nearer for the rule to take `ids[position]`.

    Tokens with a higher score must fall behind it or be dropped by top-k, top-p or min-p, and it
    must be kept: a near-tie at the border of what is kept is one as any other.
    """
    unit = rule.conf.temperature or 1.0  # of the scores, in logits
    token, tokens = ids[position], torch.arange(len(logits))
    said = torch.isin(tokens, torch.tensor(ids[:position], dtype=torch.int64))
    known = said | torch.isin(tokens, torch.tensor(prompt.ids))
    scores = rule.penalised(logits.cpu().float(), History(known=known, said=said)) / unit
    margins, noisy = rule.margins(scores), scores
    if not rule.greedy:
        row, place = torch.tensor([prompt.row_id]), torch.tensor([[len(prompt.ids) + position]])
        noisy = scores + gumbel(seed_of(rule, TARGET), row, 0, place, tokens)[0, 0]
    in_the_way = (noisy - noisy[token]).minimum(margins).max()
    return unit * max(float(in_the_way), -float(margins[token]))

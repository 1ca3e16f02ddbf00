"""Check that the output is the target's own: compare each token with one-token-at-a-time decoding.

In fp32 the answers must be equal. In a lower precision near-ties may fall the other way; how near they must be is
measured by one-token passes against the model's own forward pass over the same tokens, without trees or the runtime's
masks, positions and cache. A gap that the precision cannot explain is not used as a tolerance (docs/exactness.md).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.engine.steps import TARGET_NOISE, derive_seed
from infer.results.records import Exactness, LogitTolerance, PromptResult
from infer.results.schema import Mismatch
from models.targets.language_model import LanguageModel
from models.trees.keyed_noise import gumbel_noise, split_row_ids
from models.trees.sampling import History, apply_penalties, drop_margins
from models.trees.sampling_config import SamplingConf

# The gap of a mismatch that no rounding explains: a finite number, because JSON has no infinity.
UNEXPLAINED_GAP = torch.finfo(torch.float32).max
ROUNDING_MARGIN = 2.0  # a mismatch involves two logits, and rounding may move each of them
GAP_QUANTILE = 0.999
SUBLAYERS_PER_LAYER = 2  # attention and MLP each round the residual stream once
MAX_MEASURED_TOKENS = 64  # per answer; bounds the logits that are held in memory


def measure_tolerance(decoder: Decoder, prompts: Sequence[EvalPrompt], *, max_new_tokens: int) -> LogitTolerance:
    """Return the tolerance, measured by decoding token by token and rereading in one plain pass.

    `decoder` must be autoregressive. Neither side uses trees, so that a wrong mask, position or
    cache move of a tree cannot widen the gap that trees are judged by.
    """
    target, largest_logit = decoder.target, 0.0
    differences = WidestDifferences(most=len(prompts) * MAX_MEASURED_TOKENS * target.vocab_size)
    limit = min(MAX_MEASURED_TOKENS, max_new_tokens)
    for prompt in prompts:
        logits: list[Tensor] = []
        (generation,) = decoder.decode([prompt.ids], row_ids=[prompt.row_id], max_new_tokens=limit, logits_out=logits)
        reference = compute_reference_logits(target, prompt.ids, generation.ids, slots=decoder.slots)
        differences.add((torch.cat(logits).float() - reference).abs().flatten())
        largest_logit = max(largest_logit, float(reference.abs().max()))
    return derive_tolerance(
        differences.quantile(),
        largest_logit=largest_logit,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        dtype=target.head.weight.dtype,
    )


class WidestDifferences:
    """The GAP_QUANTILE of differences that come in parts and number `most` at the most.

    Only those that it can be are kept: all logits of a few dozen answers would take gigabytes.
    """

    def __init__(self, *, most: int):
        self.num_kept = 3 + int((1 - GAP_QUANTILE) * most)
        self.count, self.widest = 0, torch.zeros(0)  # in descending order

    def add(self, differences: Float[Tensor, " count"]) -> None:
        self.count += len(differences)
        widest = torch.cat([self.widest, differences])
        self.widest = widest.topk(min(self.num_kept, len(widest))).values

    def quantile(self) -> float:
        return float(self.widest[self.count - 1 - int(GAP_QUANTILE * (self.count - 1))])


@torch.no_grad()
def compute_reference_logits(
    target: LanguageModel, prompt: list[int], answer: list[int], *, slots: int
) -> Float[Tensor, "rows vocab"]:
    """Return the logits after each token of the answer but the last, from a single pass.

    The answer must have at most MAX_MEASURED_TOKENS tokens. The pass is transformers' own forward. Padding follows the
    text, and the number of logits does not depend on the answer's length, so that few shapes are needed.
    """
    text_ids = [*prompt, *answer[:-1]]
    input_ids = torch.zeros(1, min(bucket_length(len(text_ids)), slots), dtype=torch.int64)
    input_ids[0, : len(text_ids)] = torch.tensor(text_ids)
    positions = (len(prompt) + torch.arange(MAX_MEASURED_TOKENS)).clamp(max=input_ids.shape[1] - 1)
    device = target.device.torch_device
    hidden = target.decoder(input_ids=input_ids.to(device), use_cache=False).last_hidden_state
    logits = target.logits(hidden[0].index_select(0, positions.to(device)))
    return logits.cpu().float()[: len(answer) - 1]


def derive_tolerance(
    measured_gap: float, *, largest_logit: float, num_layers: int, hidden_size: int, dtype: torch.dtype
) -> LogitTolerance:
    """Return the gap that rounding may close, and the widest gap that the precision explains.

    `measured_gap` is the GAP_QUANTILE of the absolute differences of logits between the two passes, `largest_logit` is
    the largest absolute logit. With eps the spacing of numbers just above 1 (2^-7 in bf16):

    * A logit is a rounded number, so two passes may differ by one step, eps * largest_logit at
      most, even if nothing before it differed. The gap is never smaller than that.
    * A residual stream is rounded after each of its 2 * num_layers sublayers. Each may differ by
      one step, independently of the others, so the steps add up like a random walk, to
      sqrt(2 * num_layers) of them. Sums are accumulated in fp32: those of hidden_size terms in
      another order differ by sqrt(hidden_size) fp32 steps, which matters only in fp32.

    A router of experts is not covered: when it chooses other experts, logits move by any amount.
    Such targets show a wider gap than the precision explains.
    """
    step = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * hidden_size**0.5
    one_step_gap = ROUNDING_MARGIN * step * largest_logit
    return LogitTolerance(
        near_tie_gap=max(ROUNDING_MARGIN * measured_gap, one_step_gap),
        explained_gap=one_step_gap * (SUBLAYERS_PER_LAYER * num_layers) ** 0.5,
        exact_arithmetic=dtype == torch.float32,
    )


def compare_answers(
    decoder: Decoder, baseline: list[PromptResult], results: list[PromptResult], tolerance: LogitTolerance
) -> Exactness:
    """Return every mismatch of `results` with the target, as scored by an autoregressive `decoder`.

    Answers that equal those of `baseline` need no scoring.
    """
    expected = {result.prompt.id: result.generation.ids for result in baseline}
    prompts = {result.prompt.id: result.prompt for result in results}
    # A set, because several passes over a prompt mostly repeat one answer.
    answers = {(result.prompt.id, tuple(result.generation.ids)) for result in results}
    mismatches = [
        Mismatch(prompt_id=prompt_id, position=position, logit_gap=gap)
        for prompt_id, ids in sorted(answers)
        if list(ids) != expected[prompt_id]
        for position, gap in _find_mismatches(decoder, prompts[prompt_id], list(ids), expected[prompt_id])
    ]
    return Exactness(mismatches=mismatches, tolerance=tolerance)


def _find_mismatches(
    decoder: Decoder, prompt: EvalPrompt, ids: list[int], expected: list[int]
) -> list[tuple[int, float]]:
    """Return (position, logit gap) of each token that the target, token by token, does not choose.

    If the target chooses every token and `ids` still differs from `expected`, the answer ended at
    the wrong position, or the target answered differently the second time: some devices add
    in any order. The former gets a gap that nothing explains, the latter a gap of 0.
    """
    rule = decoder.program.sampling
    mismatches = [
        (position, min(logit_shortfall(rule, logits, prompt, ids, position), UNEXPLAINED_GAP))
        for position, (logits, scores) in enumerate(decoder.force_tokens(prompt.ids, prompt.row_id, ids))
        if int(scores.argmax()) != ids[position]
    ]
    if mismatches:
        return mismatches
    pairs = zip(ids, expected, strict=False)
    first_difference = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    return [(len(ids), UNEXPLAINED_GAP)] if first_difference is None else [(first_difference, 0.0)]


def logit_shortfall(
    rule: SamplingConf, logits: Float[Tensor, " vocab"], prompt: EvalPrompt, ids: list[int], position: int
) -> float:
    """Return by how much two logits must come closer for the rule to choose `ids[position]`.

    Every token with a higher score must fall below it or be dropped by top-k, top-p or min-p, and
    the token itself must not be dropped: a near-tie at such a cutoff counts like any other.
    """
    temperature = rule.temperature or 1.0  # scores are logits over the temperature
    token, vocab_ids = ids[position], torch.arange(len(logits))
    in_answer = torch.isin(vocab_ids, torch.tensor(ids[:position], dtype=torch.int64))
    in_text = in_answer | torch.isin(vocab_ids, torch.tensor(prompt.ids))
    history = History(in_text=in_text, in_answer=in_answer)
    scores = apply_penalties(rule, logits.cpu().float(), history) / temperature
    margins, noisy_scores = drop_margins(rule, scores), scores
    if not rule.is_greedy:
        row_limbs = split_row_ids([prompt.row_id])
        positions = torch.tensor([[len(prompt.ids) + position]])
        seed = derive_seed(rule, TARGET_NOISE)
        noisy_scores = scores + gumbel_noise(seed, row_limbs, 0, positions, vocab_ids)[0, 0]
    shortfall = (noisy_scores - noisy_scores[token]).minimum(margins).max()
    return temperature * max(float(shortfall), -float(margins[token]))

"""Correct decoding in bf16 is called lossless on 200 prompts, with dense targets of three families."""

from dataclasses import replace

import pytest
import torch

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoder
from infer.measure.exactness import compare_answers, measure_tolerance
from infer.results.records import PromptResult
from infer.results.schema import LosslessVerdict
from models.targets.loading import freeze_model
from models.trees.sampling_config import SamplingConf
from tests.support.models.family_models import family_model, family_target, partly_agreeing
from tests.support.models.tiny import CPU, VOCAB, tiny_tokenizer, tree

COUNT, NEW, SLOTS = 200, 32, 64


@pytest.fixture(scope="module")
def prompts() -> list[EvalPrompt]:
    numbers = torch.Generator().manual_seed(5)
    return [
        EvalPrompt(id=f"p{i}", category="all", ids=torch.randint(1, VOCAB, (4 + i % 13,), generator=numbers).tolist())
        for i in range(COUNT)
    ]


def decode_prompts(decoder: Decoder, prompts: list[EvalPrompt]) -> list[PromptResult]:
    rows = decoder.decode([p.ids for p in prompts], row_ids=[p.row_id for p in prompts], max_new_tokens=NEW)
    pairs = zip(prompts, rows, strict=True)
    return [PromptResult(prompt=prompt, generation=row) for prompt, row in pairs]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_two_hundred_prompts_in_bf16_are_answered_losslessly(family, prompts):
    half = replace(CPU, dtype=torch.bfloat16)
    model = family_model(family).to(torch.bfloat16)
    target = freeze_model(model, tiny_tokenizer(), name=family, device=half)
    draft = partly_agreeing(family, family_target(family)).to(torch.bfloat16)
    alone = Decoder(target, sampling=SamplingConf(), slots=SLOTS)
    tolerance = measure_tolerance(alone, prompts[:8], max_new_tokens=NEW)
    plain = decode_prompts(alone, prompts)
    for batch in (1, 4):
        shared = {"sampling": SamplingConf(), "slots": SLOTS, "batch": batch}
        traces = decode_prompts(Decoder(target, draft, tree(), **shared), prompts)
        exactness = compare_answers(alone, plain, traces, tolerance)
        assert sum(sum(trace.generation.accepted) for trace in traces) > COUNT
        assert exactness.verdict == LosslessVerdict.yes, (batch, tolerance, exactness.mismatches)

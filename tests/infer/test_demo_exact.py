"""On the demo, a few prompts are decoded to the answers of transformers' `generate`, token for token.

All held-out prompts, with a distilled draft and every shape of tree: tests/long/test_demo_exact.py.
"""

import torch

from data.eval_prompts.prompts import load_eval_prompts
from infer.engine.decode import Decoder
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import demo_target, mixed, new_draft

NEW = 12
CATEGORIES = ("code", "structured")


def test_two_prompts_are_answered_as_by_transformers():
    """Decode with an untrained draft and tokens copied from the text, so that some rounds accept."""
    target = demo_target()
    by_category = {p.category: p for p in load_eval_prompts(target.tokenizer, None, limit=None)}
    prompts = [by_category[category] for category in CATEGORIES]
    slots = max(len(prompt.ids) for prompt in prompts) + NEW
    draft = new_draft(target)
    decoder = Decoder(target, draft, mixed(), sampling=SamplingConf(), slots=slots)
    accepted = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        (ours,) = decoder.decode([prompt.ids], row_ids=[prompt.row_id], max_new_tokens=NEW, eos_ids=target.eos_ids)
        assert ours.ids == theirs[0, len(prompt.ids) :].tolist(), prompt.id
        accepted += ours.accepted
    assert min(accepted) == 0 < max(accepted)

"""Every family of targets decodes exactly what transformers computes."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.batch import Batch
from models.drafts.loss import compute_loss
from models.drafts.options import MedusaConf
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.trees.sampling_config import SamplingConf
from tests.support.models.cached import read_prompts, read_tree
from tests.support.models.family_models import FAMILIES, MORE, WINDOW, family_model, family_target, partly_agreeing
from tests.support.models.tiny import CPU, VOCAB, batch_of, chain, learn, new_draft, static, tiny_tokenizer, tree
from tests.support.runs import run_module

# root and two branches, the second deeper than the window
#                         root  0   1   2   3   4   5   6
TREE = torch.tensor([[13, 21, 22, 23, 24, 25, 26, 27]])
PARENTS = torch.tensor([[-1, -1, 0, 1, 3, 4, 5]])
BRANCH = [13, 22, 24, 25, 26, 27]
PATHS = [[13], [13, 21], [13, 22], [13, 21, 23], *(BRANCH[:n] for n in (3, 4, 5, 6))]


@pytest.fixture(scope="module")
def targets():
    """Return a function that builds the target of a family at its first call."""
    return functools.cache(family_target)


def draw_text(length: int, seed: int = 3) -> list[int]:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=numbers).tolist()


def compute_logits(target, ids):
    """Compute the logits after each token of a text by transformers alone."""
    return target.model(torch.tensor([ids])).logits[0]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def read(target, cache, prompts, padded):
    lengths, seen = read_prompts(target, cache, prompts, padded, layers=[])
    return lengths, target.logits(seen.hidden)


def score(target, cache, lengths, ids, parents, **moves):
    return target.logits(read_tree(target, cache, lengths, ids, parents, layers=[], **moves))


@pytest.mark.parametrize("family", FAMILIES | MORE)
@torch.no_grad()
def test_a_tree_in_the_cache_is_scored_as_each_of_its_paths_alone(family, targets):
    """Rows of unequal lengths lie on both sides of the window; after an accepted path, a second tree follows."""
    target = targets(family)
    prompts = [draw_text(WINDOW - 3), draw_text(WINDOW + 9, seed=4), draw_text(WINDOW, seed=5)]
    cache = target.new_cache(3, 40)
    lengths, logits = read(target, cache, prompts, 24)
    for row, prompt in enumerate(prompts):
        assert_close(logits[row, : len(prompt)], compute_logits(target, prompt))
    tree, parents = TREE.expand(3, -1), PARENTS.expand(3, -1)
    logits = score(target, cache, lengths, tree, parents)
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(PATHS):
            assert_close(logits[row, node], compute_logits(target, prompt + path)[-1])
    moved = (torch.tensor([[2, 4]]), torch.tensor([[1, 2]]))  # 13 already has its slot, 22 and 24 move to the next
    source, goal = (lengths[:, None] + part for part in moved)
    logits = score(target, cache, lengths + 3, tree, parents, source=source, goal=goal)
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(PATHS):
            assert_close(logits[row, node], compute_logits(target, [*prompt, 13, 22, 24, *path])[-1])


@pytest.mark.parametrize("family", FAMILIES | MORE)
@torch.no_grad()
def test_documents_of_packed_rows_are_computed_as_if_alone(family, targets):
    target = targets(family)
    documents = [draw_text(WINDOW + 6), draw_text(5, seed=4), draw_text(WINDOW + 2, seed=5)]
    ids = torch.tensor([[t for document in documents for t in document]])
    sizes = torch.tensor([len(document) for document in documents])
    batch = Batch(
        input_ids=ids,
        answer_mask=torch.ones_like(ids, dtype=torch.bool),
        document_ids=torch.arange(3).repeat_interleave(sizes)[None],
        positions=torch.cat([torch.arange(size) for size in sizes])[None],
    )
    seen = run_target(target, [], batch)
    ours = target.logits(seen.hidden)[0].split(sizes.tolist())
    for logits, document in zip(ours, documents, strict=True):
        assert_close(logits, compute_logits(target, document))


NEW = 20
SLOTS = 64


def decode_by_transformers(target, prompts):
    """Decode every prompt by transformers' own greedy decoding."""
    texts = [
        target.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0] for prompt in prompts
    ]
    return [ids[len(prompt) :].tolist() for ids, prompt in zip(texts, prompts, strict=True)]


@pytest.fixture(scope="module")
def greedy_answers(targets):
    """Return a function from a family to prompts on both sides of the window and their greedy answers."""

    @functools.cache
    def decode(family):
        prompts = [draw_text(n, seed=n) for n in (3, WINDOW + 12, WINDOW, 2)]
        return prompts, decode_by_transformers(targets(family), prompts)

    return decode


SHAPES = {"chain": chain(4), "static": static(), "dynamic": tree()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family, shape, targets, greedy_answers):
    """The draft is accepted in part; rows are decoded alone, and four of unequal lengths together."""
    target, (prompts, texts) = targets(family), greedy_answers(family)
    assert len({tuple(t) for t in texts}) == 4
    assert len({token for t in texts for token in t}) > 12  # no loops
    draft = partly_agreeing(family, target)
    accepted = []
    for batch, starts in ((1, (0, 1)), (4, (0,))):
        decoder = Decoder(target, draft, SHAPES[shape], sampling=SamplingConf(), slots=SLOTS, batch=batch)
        for i in starts:  # alone: a prompt on each side of the window
            rows = list(range(i, i + batch))
            decoded = decoder.decode(prompts[i : i + batch], row_ids=rows, max_new_tokens=NEW)
            assert [row.ids for row in decoded] == texts[i : i + batch]
            accepted += [count for row in decoded for count in row.accepted]
    assert len(set(accepted)) > 2  # some paths in full, and only the beginnings of others


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_layer_and_heads_learn_from_every_family(family, targets, greedy_answers):
    """A few steps on two texts lower the loss, and greedy output stays that of transformers."""
    target, (prompts, texts) = targets(family), greedy_answers(family)
    size = len(prompts[1]) + NEW
    lines = [(prompt + answer)[:size] for prompt, answer in zip(prompts, texts, strict=True)]
    batch = batch_of([line for line in lines if len(line) == size])
    drafts = (new_draft(target, layers=[1, 2, 3]), build_draft(MedusaConf(heads=4), target, loss=LossConf(), seed=0))
    for draft in drafts:
        with torch.no_grad():
            seen = run_target(target, draft.needs.layers, batch)
            before = compute_loss(draft.loss_terms(batch, seen)).total
        learn(draft, target, batch, steps=8, lr=1e-2)
        assert compute_loss(draft.loss_terms(batch, seen)).total < before
        decoder = Decoder(target, draft, tree(), sampling=SamplingConf(), slots=SLOTS, batch=4)
        decoded = decoder.decode(prompts, row_ids=[0, 1, 2, 3], max_new_tokens=NEW)
        assert [row.ids for row in decoded] == texts
        assert max(decoded[1].accepted) > 0  # on a learned text


def test_experts_stored_in_four_bits_are_computed_in_full_precision(tmp_path):
    """gpt-oss is published so: two numbers in a byte, the lower bits first, and an exponent for each 32 numbers."""
    family_model("gpt_oss").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    numbers = torch.Generator().manual_seed(0)
    stored, blocks = {}, {}
    for name, tensor in load_file(weights).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            shape = experts, outer, inner // 32, 16
            blocks[name] = torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)
            stored[f"{name}_blocks"] = blocks[name]
            stored[f"{name}_scales"] = torch.full(shape[:3], 124, dtype=torch.uint8)
        else:
            stored[name] = tensor
    save_file(stored, weights, metadata={"format": "pt"})
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantized))
    target = load_target(TargetConf(name=str(tmp_path)), CPU)
    parameters = dict(target.model.named_parameters())
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([positive, -positive])
    for name, packed in blocks.items():
        numbers = torch.stack([values[(packed % 16).long()], values[(packed // 16).long()]], -1)
        expected = numbers.flatten(2).mT * 2.0 ** (124 - 127)
        assert torch.equal(parameters[name], expected)
    assert len(blocks) == 8
    prompt = draw_text(9)
    cache = target.new_cache(1, 16)
    with torch.no_grad():
        assert_close(read(target, cache, [prompt], 9)[1][0], compute_logits(target, prompt))


@pytest.mark.system
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_compiled_rounds_add_no_graph_and_emit_the_tokens_of_eager_rounds(family):
    """The rounds are compiled in a separate process: see tests/support/runs/compiled_run.py."""
    facts = run_module("compiled_families", family)[family]
    assert facts["graphs"] > 0
    assert facts["added"] == 0
    assert facts["equal"]
    assert facts["layer_graphs"] == 1  # of four layers of two kinds

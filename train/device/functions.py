"""Fourth stage: training and decoding of a small target, compiled, beside the CPU.

Every method is trained for one step, and every mode of decoding decodes twice: the second time must need no graph.
In fp32, losses, gradients, tokens and acceptance are those of the CPU. Acceptance matters by itself: a dropped sort
makes a tree grow from the wrong nodes, and the answers stay right.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from conf.entry import compose
from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from infer.engine.graph_plan import list_graphs
from models.device.device import Device
from models.drafts.base import Draft
from models.drafts.loss import LossModule
from models.drafts.ngram import NgramDraft
from models.drafts.options import CausalLMConf, DraftConf, Eagle3Conf, InitFrom
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.loading import freeze_model
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE, Tree, TreeKind
from train.config.run import TrainConf
from train.device.checks import Check, CheckContext, CheckFailedError, confirm
from train.graph_warmup import draw_rows

VOCAB, NUM_LAYERS = 512, 4  # of the small target
SHARPNESS = 12.0  # of its next token's distribution, so that a draft of some of its layers agrees at times
ROWS, LENGTH = 2, 128
BATCH = 8  # of the checks of several rows
NEW_TOKENS = 12
METHODS = ("demo", "demo-lm", "demo-medusa", "demo-eagle1", "demo-hydra", "demo-medusa2")
DRAFT_MODEL = CausalLMConf(init_from=InitFrom.pruned, layers=[0, 1, NUM_LAYERS - 1])
LATE_STEP = 1_000_000  # after every warm-up: weights near zero would leave nothing but rounding
TOLERANCE = 2e-3  # relative, of losses and gradients in fp32
# Rounding in low precision is as random as its order of sums, so the device may be this many times farther off.
LOW_PRECISION_FACTOR = 3.0
WRONG = "stages=[operators] tells which operator is computed wrongly; device.compile=false, if it is the compiler"


def list_checks(context: CheckContext) -> Iterator[Check]:
    """Yield the checks of one row first, because those of several differ in few ways."""
    device = replace(context.device, dtype=torch.float32)

    def check_modes(batch: int) -> Iterator[Check]:
        for mode in list_modes():
            run = partial(compare_decoding, mode, batch, device, context.reference)
            yield Check(name=f"decoding, {mode}, batch {batch}", run=run, remedy=WRONG)

    yield from check_modes(1)
    for method in METHODS:
        run = partial(compare_training, method, device, context.reference)
        yield Check(name=f"training, {method}", run=run, remedy=WRONG)
    yield Check(
        name="accuracy of low precision",
        run=partial(compare_precision, context.device, context.reference),
        remedy="set device.precision=float32, and compare the compiler's flags (docs/trainium.md)",
    )
    yield from check_modes(BATCH)


def build_tiny_target(device: Device) -> Target:
    """Return a small target on the device; its random weights are the same on every device."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS * config.initializer_range)
    target = freeze_model(model.to(device.dtype), None, name="tiny", device=device)
    model.to(device.torch_device)
    return target


# --- decoding ---------------------------------------------------------------------------------


Answer = tuple[list[int], list[int]]  # tokens, and accepted tokens of each round
Mode = tuple[DraftConf | NgramDraft | None, Tree, SamplingConf]


def list_modes() -> dict[str, Mode]:
    """Return the draft, the tree and the sampling of each mode of decoding, the plain ones first."""
    greedy, eagle3 = SamplingConf(), Eagle3Conf(layers=[0, 1, 2], ttt_steps=4)
    chain, dynamic = TreeConf(kind=TreeKind.chain, depth=3), TreeConf(depth=3, nodes=6, children=3)
    static = TreeConf(kind=TreeKind.static, paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    trees = {"chain": chain, "static tree": static, "dynamic tree": dynamic}
    modes: dict[str, Mode] = {
        "alone": (None, NO_TREE, greedy),
        "lookup": (NgramDraft(), chain.build(), greedy),
        **{f"draft model, {name}": (DRAFT_MODEL, tree.build(), greedy) for name, tree in trees.items()},
        "draft model, mixed tree": (DRAFT_MODEL, replace(dynamic, ngram_tokens=4).build(), greedy),
        "EAGLE-3, dynamic tree": (eagle3, dynamic.build(), greedy),
    }
    samplings = {
        "temperature 0.7": SamplingConf(temperature=0.7),
        "top-p 0.9": SamplingConf(temperature=0.7, top_p=0.9),
        "penalties": SamplingConf(repetition_penalty=1.2, presence_penalty=0.1),
    }
    return modes | {f"draft model, {name}": (DRAFT_MODEL, dynamic.build(), rule) for name, rule in samplings.items()}


def compare_decoding(name: str, batch: int, device: Device, reference: Device) -> str:
    """Decode on the device, twice, and on the CPU; raise CheckFailedError for other tokens, acceptance or graphs."""
    expected = build_decoder(name, batch, reference)
    decoder = build_decoder(name, batch, device)
    prompts = draw_prompts(batch)
    needed = list(list_graphs(decoder.session, map(len, prompts)))
    with device.ledger.expect_graphs(needed, strict=False) as budget:
        first = decode(decoder, prompts)
        before = device.count_graphs()
        again = decode(decoder, prompts)
    if device.compiles and (device.count_graphs() > before or sum(budget.compiled.values()) > len(needed)):
        raise CheckFailedError(f"graphs: {len(needed)} announced, {sum(budget.compiled.values())} compiled")
    right = decode(expected, prompts)
    for answers in (first, again):
        if answers != right:
            eager = decode(build_decoder(name, batch, device.eager()), prompts)
            raise CheckFailedError(
                f"{describe_difference(answers, right)}; run eagerly: {describe_difference(eager, right)}"
            )
    rounds = sum(len(accepted) for _, accepted in right)
    return f"{len(needed)} graphs, {sum(sum(accepted) for _, accepted in right) / rounds:.2f} accepted a round"


def describe_difference(answers: list[Answer], right: list[Answer]) -> str:
    """Return the first answer whose tokens, or else accepted tokens a round, are not the right ones."""
    for row, (got, want) in enumerate(zip(answers, right, strict=True)):
        for kind, value, expected in zip(("tokens", "accepted"), got, want, strict=True):
            if value != expected:
                return f"row {row}: {kind} {value} in place of {expected}"
    return "equal"


def build_decoder(name: str, batch: int, device: Device) -> Decoder:
    target = build_tiny_target(device)
    chosen, tree, sampling = list_modes()[name]
    if isinstance(chosen, DraftConf):
        chosen = build_draft(chosen, target, loss=LossConf(), seed=0).eval().requires_grad_(False)
    return Decoder(target, chosen, tree, sampling=sampling, slots=LENGTH, batch=batch)


def draw_prompts(batch: int) -> list[list[int]]:
    """Return prompts of two lengths that repeat themselves, so that lookup finds something."""
    numbers = torch.Generator().manual_seed(1)
    return [2 * torch.randint(VOCAB, (7 + row % 2,), generator=numbers).tolist() for row in range(batch)]


def decode(decoder: Decoder, prompts: list[list[int]]) -> list[Answer]:
    """Return the tokens and the accepted tokens of each round of all answers."""
    rows = decoder.decode(prompts, row_ids=range(len(prompts)), max_new_tokens=NEW_TOKENS)
    return [(row.ids, row.accepted) for row in rows]


# --- training ---------------------------------------------------------------------------------


def compare_training(method: str, device: Device, reference: Device) -> str:
    """Compute loss and gradient of a method on both; raise CheckFailedError if they are not close."""
    loss, gradient = compute_gradient(method, device)
    right_loss, right_gradient = compute_gradient(method, reference)
    errors = {
        "loss": abs(loss - right_loss) / abs(right_loss),
        "gradient": float((gradient - right_gradient).norm() / right_gradient.norm()),
    }
    text = ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items())
    return confirm(max(errors.values()) < TOLERANCE, text)


def compute_gradient(method: str, device: Device) -> tuple[float, Tensor]:
    """Return the loss of a method's draft, and its gradient as one vector on the CPU."""
    target = build_tiny_target(device)
    draft = build_method(method, target)
    batch = draw_rows(ROWS, LENGTH, VOCAB).batch(list(range(ROWS)))
    numbers = [np.random.default_rng([0, row]) for row in range(ROWS)]
    extras = draft.prepare_batch(batch, step=LATE_STEP, generators=numbers)
    weights = draft.term_weights(batch)
    on_device = {name: value.to(device.torch_device) for name, value in extras.items()}
    if weights is not None:
        on_device["term_weight_sums"] = weights.to(device.torch_device)
    moved = batch.to(device.torch_device)
    with torch.no_grad():
        seen = device.compile_part(run_target)(target, draft.needs.layers, moved)
    loss = LossModule(draft, device, compiled=True)(moved, seen, on_device).total
    loss.backward()
    device.synchronize()
    gradients = [p.grad.flatten().float().cpu() for p in draft.parameters() if p.grad is not None]
    return float(loss.detach().cpu()), torch.cat(gradients)


def build_method(method: str, target: Target) -> Draft:
    """Return the untrained draft of an entry of conf/drafts.yaml, with layers that the small target has."""
    conf = compose("train", TrainConf, [f"draft={method}"])
    options = {"layers": [0, 1, 2]} if hasattr(conf.draft, "layers") else {}
    return build_draft(replace(conf.draft, **options), target, loss=conf.loss, seed=0)


# --- precision --------------------------------------------------------------------------------


def compare_precision(device: Device, reference: Device) -> str:
    """Compare the device's low precision with the CPU's by their distances from fp32, and fp32 with fp32."""
    exact = compute_logits(reference)
    plain = compute_logits(replace(reference, dtype=torch.bfloat16))
    ours = compute_logits(replace(device, dtype=torch.bfloat16))
    distances = [float((logits - exact).norm() / exact.norm()) for logits in (plain, ours)]
    text = "logits in bfloat16 off by {:.2e} on the CPU and by {:.2e} on the device".format(*distances)
    return confirm(distances[1] < LOW_PRECISION_FACTOR * distances[0], text)


@torch.no_grad()
def compute_logits(device: Device) -> Tensor:
    target = build_tiny_target(device)
    batch = draw_rows(ROWS, LENGTH, VOCAB).batch(list(range(ROWS))).to(device.torch_device)
    seen = device.compile_part(run_target)(target, [], batch)
    logits = target.logits(seen.hidden)
    device.synchronize()
    return logits.float().cpu()

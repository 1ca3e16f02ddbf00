"""Run the embedded demo: ten steps of training beside the CPU's, and answers beside those of Transformers."""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from conf.entry import compose
from data.config import DEMO
from data.eval_prompts.prompts import load_eval_prompts
from infer.engine.decode import Decoder
from infer.engine.requests import Generation
from models.device.config import DeviceConf, DeviceName, Precision
from models.device.device import Device
from models.device.memory_watch import MemoryWatch
from models.drafts.ngram import NgramDraft
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.pretrained import load_model
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind
from train.config.run import TrainConf
from train.device.checks import Check, CheckContext, confirm
from train.distillation import train_draft
from train.distributed.build import build_parallel
from train.run.folder import open_run

MS = 1000
DRAFTS = ("demo", "demo-lm", "demo-medusa")  # EAGLE-3, a draft model and Medusa
# AdamW, because a low rate lets the difference of a rounding stay one. The answers are those of the files: a device
# that rounds differently would answer differently, and train on other rows.
SETTINGS = """
    optim=adamw optim.steps=10 optim.rows_per_step=2 optim.micro_batch_size=2 optim.lr=1e-3 data.demo.source=corpus
    data.demo.num_prompts=96 held_out.selection=1 evaluation.max_new_tokens=4 tree=chain tree.depth=2 interval.log=1
    resume=false
""".split()  # noqa: SIM905 - a list would take a line for each setting
CPU_CONF = DeviceConf(name=DeviceName.cpu, precision=Precision.float32, compile=False)
# Sums in another order differ by 1e-7 a step, and by a thousand times that after steps of AdamW, which divides small
# gradients by their size. bfloat16 rounds each number by up to 0.4 %.
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
PROMPTS_PER_CATEGORY, NEW_TOKENS, CHAIN = 1, 32, 4
REMEDY = (
    "stages=[training] device.compile=false tells whether it is the compiler, device.precision=float32 whether bfloat16"
)


def list_checks(context: CheckContext, *, drafts: Sequence[str] = DRAFTS) -> Iterator[Check]:
    """Yield a check of decoding, and one per draft of the demo."""
    yield Check(name="the demo's answers", run=partial(check_answers, context), remedy=REMEDY)
    for draft in drafts:
        yield Check(name=f"ten steps of draft={draft}", run=partial(check_losses, context, draft), remedy=REMEDY)


def check_losses(context: CheckContext, draft: str) -> str:
    """Compare the losses of ten steps on the device with those on the CPU; raise CheckFailedError if one is too far."""
    folder = context.folder / draft
    lines = train_demo(draft, context.device, context.conf, folder / "device")
    expected = train_demo(draft, context.reference, CPU_CONF, folder / "reference")
    pairs = [(line["train/loss"], other["train/loss"]) for line, other in zip(lines, expected, strict=True)]
    differences = [abs(loss / other - 1) for loss, other in pairs]
    difference = max(differences)
    bound = MAX_DIFFERENCE[context.device.dtype]
    figures = (
        f"losses differ by {difference:.1e} at most, at step {differences.index(difference) + 1} (bound {bound:g}); "
        f"{count_tokens_per_s(lines):,.0f} tokens/s after the first step, the CPU {count_tokens_per_s(expected):,.0f}"
    )
    return confirm(difference <= bound, figures)


def train_demo(draft: str, device: Device, conf: DeviceConf, folder: Path) -> list[dict[str, float]]:
    """Train a draft of the demo as `python -m train` does, without its report; return the metrics of each step."""
    run_conf = compose("train", TrainConf, [f"draft={draft}", *SETTINGS])
    run_conf = replace(run_conf, device=conf, output_dir=str(folder), run_name=draft)
    AcceleratorState._reset_state(reset_partial_state=True)  # else Accelerate would stay on the first run's device
    parallel = build_parallel(run_conf.parallel, device, trackers=[])
    run = open_run(run_conf, parallel)
    target = parallel.build_target(run_conf)
    metric_logger = train_draft(run_conf, parallel, run, target)
    parallel.free_training_memory()
    return [json.loads(line) for line in metric_logger.file.read_text().splitlines()]


def count_tokens_per_s(lines: Sequence[dict[str, float]]) -> float:
    """Return the tokens per second of all steps but the first, which compiles."""
    seconds = [
        (line["train/tokens"] - before["train/tokens"]) / line["train/tokens_per_s"] for before, line in pairwise(lines)
    ]
    return (lines[-1]["train/tokens"] - lines[0]["train/tokens"]) / sum(seconds)


def check_answers(context: CheckContext) -> str:
    """Decode the demo's prompts; raise CheckFailedError if fp32 answers differ from those of Transformers."""
    watch = MemoryWatch(context.device)
    target = load_target(TargetConf(), context.device)
    prompts = [p.ids for p in load_eval_prompts(target.tokenizer, DEMO, limit=PROMPTS_PER_CATEGORY)]
    slots = max(map(len, prompts)) + NEW_TOKENS
    tree = TreeConf(kind=TreeKind.chain, depth=CHAIN).build()
    alone = decode_twice(Decoder(target, sampling=SamplingConf(), slots=slots), prompts)
    lookup = decode_twice(Decoder(target, NgramDraft(), tree, sampling=SamplingConf(), slots=slots), prompts)
    peak_bytes = watch.peak_bytes()
    # Where compilers are slow, each operator of `generate` would take a graph of its own for every length.
    generating = context.reference if context.device.compiles_slowly else context.device
    expected, token_ms = generate(generating, prompts)
    equal = sum(a.ids == b.ids == ids for a, b, ids in zip(alone, lookup, expected, strict=True))
    memory = "unknown" if peak_bytes is None else f"{peak_bytes / 2**20:.0f} MiB {watch.quantity}"
    figures = (
        f"{equal} of {len(prompts)} answers are those of Transformers; a step takes {_median_ms(alone):.2f} ms, a "
        f"round of lookup {_median_ms(lookup):.2f} ms, a token of Transformers {token_ms:.2f} ms on {generating.name}; "
        f"memory {memory}"
    )
    return confirm(context.device.dtype is not torch.float32 or equal == len(prompts), figures)


def decode_twice(decoder: Decoder, prompts: Sequence[list[int]]) -> list[Generation]:
    """Return the answers of a second pass, for which everything is compiled."""
    options = {"row_ids": range(len(prompts)), "max_new_tokens": NEW_TOKENS, "eos_ids": decoder.target.eos_ids}
    decoder.decode(prompts, **options)
    return decoder.decode(prompts, **options)


def generate(device: Device, prompts: Sequence[list[int]]) -> tuple[list[list[int]], float]:
    """Return the answers of Transformers to the prompts, and its ms a token."""
    model = load_model(TargetConf(), device.dtype).to(device.torch_device).eval()

    def answer(ids: list[int]) -> list[int]:
        input_ids = torch.tensor([ids], device=device.torch_device)
        output = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        return output[0, len(ids) :].tolist()

    answer(prompts[0])  # warms up
    start = time.perf_counter()
    answers = [answer(ids) for ids in prompts]
    return answers, MS * (time.perf_counter() - start) / sum(map(len, answers))


def _median_ms(answers: Sequence[Generation]) -> float:
    return MS * statistics.median(seconds for answer in answers for seconds in answer.round_s)

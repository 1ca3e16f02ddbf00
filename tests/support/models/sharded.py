"""Run cut models on several processes; each writes its measurements to a file."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from data.features.target_pass import run_target
from infer.engine.decode import Decoder
from models.device.xla.device import XlaDevice
from models.drafts.causal_lm import CausalLMDraft
from models.drafts.loss import LossModule, compute_loss
from models.drafts.options import CausalLMConf, DraftConf, Eagle1Conf, Eagle3Conf, HydraConf, InitFrom, MedusaConf
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.parallel.tensor_parallel import parallelize_model
from models.targets.config import TargetConf
from models.targets.loading import freeze_model, load_target
from models.trees.sampling_config import SamplingConf
from tests.support.models import nxd
from tests.support.models.family_models import EXPERTS, HEADS, SHAPE, SLIDING
from tests.support.models.parallel_layers import build_reference_layers
from tests.support.models.tiny import CPU, add_noise, batch_of, chain, tiny_target, tiny_tokenizer, tree
from tests.support.runs.killing import TIMEOUT_S
from tests.support.runs.toy_run import toy_conf
from train.config.optim import OptimConf, OptimName
from train.config.run import ParallelConf, Weights
from train.distributed.xla import XlaParallel
from train.optim import allocate_optimizer_states, build_optimizers, trained_parameters

PROCESSES = 8
RANKS = (1, 2, 4, 8)
BF16_DRAFTS: dict[str, DraftConf] = {  # with frozen heads, and tables of their own
    "eagle3": Eagle3Conf(layers=[1, 3], train_head=False, ttt_steps=2),
    "eagle1": Eagle1Conf(),
    "medusa": MedusaConf(heads=2),
    "hydra": HydraConf(heads=2),
    "draft model": CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5]),
}
HEADED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
# every case of the promise: grouped, single and ungrouped heads, biases, tied and odd
# vocabularies, features gathered around norms and slices, embeddings that scale
CUT: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE | HEADED | {"head_dim": 16, "attention_bias": True}),
    "llama": lambda: transformers.LlamaConfig(
        **SHAPE | HEADED | {"head_dim": 16, "mlp_bias": True, "attention_bias": True}
    ),
    "single key-value head": lambda: transformers.Qwen3Config(
        **SHAPE | HEADED | {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "as many key-value heads": lambda: transformers.LlamaConfig(
        **SHAPE | HEADED | {"num_key_value_heads": 8, "vocab_size": 61}
    ),
    "olmo3": lambda: transformers.Olmo3Config(**SHAPE | HEADED, layer_types=2 * ["full_attention"]),
    "phi3": lambda: transformers.Phi3Config(**SHAPE | HEADED),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE | HEADED | {"head_dim": 16}, layer_types=2 * ["full_attention"], query_pre_attn_scalar=16
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE | HEADED),
}
UNCUT: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=6),
    "gpt_oss": lambda: transformers.GptOssConfig(**HEADS, **SLIDING, num_local_experts=4),
    "cohere": lambda: transformers.CohereConfig(**SHAPE | HEADED, use_qk_norm=True),
}


def build_model(config: Any) -> Any:
    """Build a random model with biases and norms large enough to matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    numbers = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter += 0.3 * torch.randn(parameter.shape, generator=numbers)
    return model


def run_rank(rank: int, folder: Path) -> None:
    """Measure everything that this rank takes part in; write the results to a file named after the rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=TIMEOUT_S)
    )
    groups = {ranks: dist.new_group(range(ranks)) for ranks in RANKS}
    rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # not neighbors, as on Trn1
    results = {
        f"{name}, {ranks} ranks": measure_difference(name, groups[ranks])
        for ranks in RANKS
        for name in CUT
        if rank < ranks
    }
    if rank < 2:
        results["texts"] = decode_texts(groups[2])
        results["moments"] = measure_moments(rank, groups[2], torch.float32)
        results["moments of bf16 weights"] = measure_moments(rank, groups[2], torch.bfloat16)
        results |= {f"bf16 {method}": measure_bf16_draft(rank, groups[2], method) for method in BF16_DRAFTS}
    if rank < 4:
        results["engine"] = measure_engine(folder / "target", rank, rings[rank % 2])
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure_difference(name: str, group: dist.ProcessGroup) -> list[float]:
    """Return the largest difference of the cut model's logits, and the share of weights that this rank holds."""
    model = build_model(CUT[name]())
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    uncut, weights = model(ids).logits, sum(p.numel() for p in model.parameters())
    parallelize_model(model, build_reference_layers(group))
    held = sum(p.numel() for p in model.parameters())
    return [(model(ids).logits - uncut).abs().max().item(), held / weights]


def measure_engine(folder: Path, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Load a target by `device=xla` on two groups of two processes; compare it with the uncut target."""
    nxd.install(group, data_rank=rank % 2)
    device = XlaDevice(**vars(CPU) | {"name": "xla"})
    ranks: Any = SimpleNamespace(process_index=rank, num_processes=4)
    parallel = XlaParallel(conf=ParallelConf(tensor=2), device=device, accelerator=ranks)
    conf = toy_conf(draft=Eagle3Conf(layers=[0, 1], vocab_size=None), target=TargetConf(path=str(folder)))
    uncut, cut = load_target(conf.target, CPU), parallel.build_target(conf)
    whole_head = parallel.build_target(replace(conf, draft=Eagle1Conf()))
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(rank % 2))
    drafts = [build_draft(conf.draft, target, loss=LossConf(), seed=0) for target in (uncut, cut)]
    losses = [
        compute_loss(draft.loss_terms(batch_of(ids.tolist()), run_target(target, [0, 1], batch_of(ids.tolist()))))
        for draft, target in zip(drafts, (uncut, cut), strict=True)
    ]
    for loss in losses:
        loss.total.backward()
    tensors = [draft.checkpoint_tensors() for draft in drafts]
    gradients = [[p.grad for p in draft.parameters() if p.grad is not None] for draft in drafts]
    return {
        "ranks": [parallel.data_rank, parallel.tensor_rank],
        "difference": (cut.model(ids).logits - uncut.model(ids).logits).abs().max().item(),
        "same": [
            getattr(cut, name) == getattr(uncut, name)
            for name in ("fingerprint", "num_parameters", "vocab_size", "num_layers")
        ],
        "rows of tables": [len(table.weight) for table in (cut.head, cut.model.get_input_embeddings())],
        "rows of a head that a loss reads": len(whole_head.head.weight),
        "loss": losses[1].total.item() / losses[0].total.item(),
        "gradients": max((ours - theirs).abs().max().item() for theirs, ours in zip(*gradients, strict=True)),
        "same checkpoint": all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0] | tensors[1]),
        "kv_heads": cut.kv_heads,
        "held": sum(p.numel() for p in cut.model.parameters()) / uncut.num_parameters,
    }


class Steps:
    """Three trained weights; two ranks cannot share the rows of the first evenly."""

    def __init__(self, adamw: type[AdamW] = AdamW):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
        decayed, plain = [self.model[0].weight, self.model[1].weight], [self.model[0].bias]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = adamw(groups, lr=0.1, betas=(0.9, 0.95))
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def learn(self, rows: Tensor, *, steps: int, average: Callable[[list[Any]], None] | None = None) -> None:
        for _ in range(steps):
            self.model(rows.to(self.model[0].weight.dtype)).square().mean().backward()
            if average is not None:
                average([*self.model.parameters()])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def resume(self, saved: list[Any]) -> "Steps":
        for ours, theirs in zip((self.model, self.optimizer, self.schedule), saved, strict=True):
            ours.load_state_dict(deepcopy(theirs))  # load_state_dict would share its tensors
        return self

    def saved(self) -> list[Any]:
        return [deepcopy(o.state_dict()) for o in (self.model, self.optimizer, self.schedule)]


def measure_moments(rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Any]:
    """Compare four steps of a single process with those of two ZeRO-1 ranks that are stopped in the middle.

    Weights and gradients of the ranks are of type `dtype`.
    """
    nxd.install(group)
    ranks: Any = SimpleNamespace(process_index=rank, num_processes=2, gradient_state=SimpleNamespace())
    conf, device = ParallelConf(draft=Weights.sharded), XlaDevice(**vars(CPU) | {"name": "xla", "dtype": dtype})
    parallel = XlaParallel(conf=conf, device=device, accelerator=ranks)
    rows = torch.arange(12.0).view(4, 3) / 10
    alone, first = Steps(), Steps(parallel.adamw_class)
    alone.learn(rows, steps=4)
    parallel.prepare_optimizers([first.optimizer])
    own = {"rows": rows[2 * rank :][:2], "steps": 2, "average": parallel.average_gradients}
    first.learn(**own)
    trained = [weight.clone() for weight in first.model.parameters()]
    held = sum(
        value.numel()
        for state in first.optimizer.engine.base_optimizer.state.values()
        for value in state.values()
        if value.ndim
    )
    with parallel.full_moments([first.optimizer]):
        saved = first.saved()
    assert not first.optimizer.state
    again, plain = Steps(parallel.adamw_class).resume(saved), Steps().resume(saved)
    parallel.prepare_optimizers([again.optimizer])
    first.learn(**own)
    again.learn(**own)
    plain.learn(rows, steps=2)  # on a single process

    def measure_differences(run: Steps, other: Steps) -> float:
        pairs = zip(run.model.parameters(), other.model.parameters(), strict=True)
        return max((ours.float() - theirs.float()).abs().max().item() for ours, theirs in pairs)

    return {
        "difference": max(measure_differences(alone, other) for other in (again, plain)),
        "after a stop": measure_differences(first, again),
        "saved in fp32": [
            weight.dtype is torch.float32 and torch.equal(weight.to(dtype), ours) and not torch.equal(weight, ours)
            for weight, ours in zip(saved[0].values(), trained, strict=True)
        ],
        "types": sorted({str(weight.dtype) for weight in first.model.parameters()}),
        "averaged": ranks.gradient_state.is_xla_gradients_synced,
        "held": held,
    }


def measure_bf16_draft(rank: int, group: dist.ProcessGroup, method: str) -> dict[str, Any]:
    """Take a run's step of two ZeRO-1 ranks in bf16, and use the draft as an evaluation does: without autocast."""
    nxd.install(group)
    device = XlaDevice(**vars(CPU) | {"name": "xla", "dtype": torch.bfloat16})
    ranks: Any = SimpleNamespace(
        process_index=rank, num_processes=2, gradient_state=SimpleNamespace(), prepare=lambda module: module
    )
    parallel = XlaParallel(conf=ParallelConf(draft=Weights.sharded), device=device, accelerator=ranks)
    target = tiny_target(seed=0, device=replace(CPU, dtype=torch.bfloat16))
    draft = build_draft(BF16_DRAFTS[method], target, loss=LossConf(), seed=0)
    module = parallel.prepare(LossModule(draft, device, compiled=False))
    optimizers, _ = build_optimizers(OptimConf(name=OptimName.adamw, steps=1), draft, parallel.adamw_class)
    allocate_optimizer_states(optimizers)
    parallel.prepare_optimizers(optimizers)
    batch = batch_of(torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(rank)).tolist())
    target_output = run_target(target, draft.needs.layers, batch)
    with torch.autocast("cpu", torch.bfloat16):
        module(batch, target_output, {}).total.backward()
    before = [weight.clone() for weight in draft.parameters()]
    parallel.average_gradients(trained_parameters(draft))
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        loss = compute_loss(draft.eval().loss_terms(batch, target_output))
        (answer,) = Decoder(target, draft, chain(2), sampling=SamplingConf(), slots=64).decode(
            [[5, 6, 7]], row_ids=[0], max_new_tokens=8, eos_ids=[]
        )
    return {
        "types": sorted({str(weight.dtype) for weight in draft.parameters()}),
        "moved": sum(not torch.equal(*pair) for pair in zip(before, draft.parameters(), strict=True)),
        "loss": loss.total.item(),
        "tokens": len(answer.ids),
    }


def build_noised() -> Any:
    """Build the uncut model with noise on its weights, a draft that often agrees with the target."""
    model = build_model(CUT["qwen3"]())
    add_noise(model, 0.05)
    return model


def decode_texts(group: dist.ProcessGroup) -> list[list[int]]:
    """Return tokens and rounds of tree decoding by the uncut and by the cut target."""
    lines = []
    for cut in (False, True):
        model = build_model(CUT["qwen3"]())
        if cut:
            parallelize_model(model, build_reference_layers(group), replicated=("lm_head",))
        target = freeze_model(model, tiny_tokenizer(64), name="tiny", device=CPU)
        draft = CausalLMDraft(CausalLMConf(name="noised"), build_noised(), target)
        decoder = Decoder(target, draft, tree(3), sampling=SamplingConf(), slots=64, batch=2)
        assert decoder.session.buffers[0].keys[0].shape[1] == (1 if cut else 2)
        prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
        answers = decoder.decode(prompts, row_ids=[0, 1], max_new_tokens=24, eos_ids=[])
        lines += [[*row.ids, len(row.accepted)] for row in answers]
    return lines

"""EAGLE-3 (https://arxiv.org/abs/2503.01840): one layer that drafts from the target's features.

    row t:   fc(low, mid, high captured at t), embedding of token t+1   ->   token t+2
    step i:  the same row, fed its own output and the embedding of token t+1+i -> token t+2+i

Training unrolls the steps that decoding performs (training-time test), so that the layer learns to
live on its own output. The recurrence carries the layer's output before the final norm, and the
concatenation puts the embedding first: as vLLM and vLLM Neuron read `Eagle3LlamaForCausalLM`.

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden, C captured layers.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models import checkpoint, vocab
from models.cache import places, prompt_mask, tree_mask
from models.drafts.base import Batch, Draft, DraftConf, Loss, Needs, State
from models.errors import UserError
from models.layers import RMSNorm, WideLayer, attend, attend_unrolled
from models.losses import LossConf, chunked_distillation
from models.sampling import SamplingRule
from models.supervision import later, row_weights, sooner
from models.target import Seen, Target
from models.tree import Proposal, Tree, grow

LAYER = "midlayer"  # the one decoder layer's name in the published layout


@dataclass(kw_only=True)
class Eagle3Conf(DraftConf):
    """What is left to choose; the rest follows from the target."""

    method: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = "Eagle3LlamaForCausalLM"

    layers: list[int] | None = None  # captured; None = [2, n // 2, n - 3], what engines default to
    unroll: int = 7  # steps of the training-time test
    vocab_size: int | None = None  # of a reduced draft vocabulary; None = the target's
    intermediate_size: int | None = None  # None = the target's
    heads: int | None = None  # None = the target's
    kv_heads: int | None = None  # None = the target's
    head_size: int | None = None  # None = the target's
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.layers is not None and any(b <= a for a, b in pairwise(self.layers)):
            raise UserError(
                f"draft.layers: must be strictly increasing, got {self.layers}; "
                "null takes low, middle and high"
            )
        for key in ("unroll", "max_depth"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "Eagle3Draft":
        """A new draft: random layer, the target's own embeddings and head rows."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = Eagle3Draft(self.describe(target), unroll=self.unroll, max_depth=self.max_depth)
        draft.loss_conf, draft.seed = loss, seed
        draft.embed_tokens.requires_grad_(self.train_embeddings)
        draft.adopt(target, torch.arange(draft.config.draft_vocab_size))
        return draft.to(target.head.weight.device)

    def describe(self, target: Target) -> LlamaConfig:
        """The draft as engines read it: a flat Llama config with EAGLE-3's own keys."""
        theirs = target.config
        layers = self.layers or default_layers(target)
        target.check_layers(layers)
        if (self.vocab_size or 0) > target.vocab_size:
            raise UserError(
                f"draft.vocab_size: must be at most the target's {target.vocab_size}, "
                f"got {self.vocab_size}; null takes the target's"
            )
        rope = dict(theirs.rope_parameters)
        if rope.get("rope_type", "default") not in ("default", "llama3"):
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        own = {
            "draft_vocab_size": self.vocab_size or target.vocab_size,
            "eagle_aux_hidden_state_layer_ids": layers,
            "num_aux_hidden_states": len(layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": layers,
                "use_aux_hidden_state": True,
            },
            "norm_before_residual": False,
            "rope_theta": rope["rope_theta"],  # older readers look for it here
            "training_unroll": self.unroll,
            "training_max_depth": self.max_depth,
        }
        return LlamaConfig(
            architectures=[self.architecture],
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or theirs.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.heads or theirs.num_attention_heads,
            num_key_value_heads=self.kv_heads or theirs.num_key_value_heads,
            head_dim=self.head_size or target.head_size,
            max_position_embeddings=theirs.max_position_embeddings,
            rms_norm_eps=theirs.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=False,
            **own,
        )

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["Eagle3Conf", "Eagle3Draft"]:
        # drafts published elsewhere may leave our own keys and the engines' default layers out
        theirs = {
            "training_unroll": cls.unroll,
            "training_max_depth": cls.max_depth,
            "draft_vocab_size": target.vocab_size,
            "eagle_aux_hidden_state_layer_ids": default_layers(target),
        }
        config = LlamaConfig(**(theirs | checkpoint.read_config(directory)))
        metadata = checkpoint.read_metadata(directory)
        checkpoint.check_fits(
            metadata,
            target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint,
        )
        if config.hidden_size != target.hidden_size:
            raise UserError(
                f"checkpoint: hidden size must be the target's {target.hidden_size}, "
                f"got {config.hidden_size}; choose the draft of this target"
            )
        unroll, max_depth = config.training_unroll, config.training_max_depth
        draft = Eagle3Draft(config, unroll=unroll, max_depth=max_depth)
        tensors = checkpoint.load(directory, draft.tensors())
        draft.load_state_dict(tensors, strict=False)  # `load` was strict; the maps may be left out
        draft.t2d.copy_(vocab.membership(vocab.kept_ids(draft.d2t), config.vocab_size))
        draft._teacher_head = (target.head,)
        draft.seed = int(metadata["seed"]) if "seed" in metadata else None
        draft.embed_tokens.requires_grad_(False)
        conf = cls(
            layers=list(config.eagle_aux_hidden_state_layer_ids),
            unroll=unroll,
            max_depth=max_depth,
            vocab_size=config.draft_vocab_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
        )
        return conf, draft.to(target.head.weight.device)

    def untrained(self, draft: Draft, target: Target) -> Draft | str:
        assert isinstance(draft, Eagle3Draft)
        if draft.seed is None:
            return "the checkpoint does not say with which seed it was started"
        before = self.build(target, loss=draft.loss_conf, seed=draft.seed)
        if draft.kept_ids is not None:
            before.adopt(target, draft.kept_ids)
        return before


def default_layers(target: Target) -> list[int]:
    """Low, middle and high: what engines assume where a checkpoint does not say."""
    return [2, target.num_layers // 2, target.num_layers - 3]


class Eagle3Draft(Draft):
    """The layer, its embeddings and head, and how it learns and drafts."""

    method = "eagle3"

    d2t: Int[Tensor, " draft_vocab"]  # target id - draft id
    t2d: Bool[Tensor, " vocab"]  # whether a target id has a draft id

    def __init__(self, config: LlamaConfig, *, unroll: int, max_depth: int):
        super().__init__()
        self.config: Any = config  # its annotations allow None where a Llama config never has it
        self.needs = Needs(layers=list(config.eagle_aux_hidden_state_layer_ids))
        self.trained_depth, self.max_depth = unroll, max_depth
        size, kept = config.hidden_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(len(self.needs.layers) * size, size, bias=False)
        self.midlayer = WideLayer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, kept, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(kept, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        for part in (self.fc, *self.midlayer.modules()):
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.02)
        self.loss_conf = LossConf()
        self.seed: int | None = None
        self._teacher_head: tuple[nn.Module, ...] = ()  # a tuple, so that it is not a submodule

    # --- before training --------------------------------------------------------------------

    def prepare(
        self, counts: Int[Tensor, " vocab"], *, target: Target, always: list[int]
    ) -> dict[str, float]:
        """Choose the reduced vocabulary by how often the answers use each token."""
        kept = vocab.choose(counts, self.config.draft_vocab_size, always)
        self.adopt(target, kept)
        return {"coverage": vocab.coverage(counts, kept)}

    @torch.no_grad()
    def adopt(self, target: Target, kept: Int[Tensor, " draft_vocab"]) -> None:
        """Take the target's embeddings, and its head rows for the kept token ids."""
        kept = kept.to(self.d2t.device)
        self.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
        self.lm_head.weight.copy_(target.head.weight[kept.to(target.head.weight.device)])
        self.d2t.copy_(vocab.offsets(kept))
        self.t2d.copy_(vocab.membership(kept, self.config.vocab_size))
        self._teacher_head = (target.head,)

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """Target ids of a reduced draft vocabulary; None where it is the target's own."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return vocab.kept_ids(self.d2t)

    # --- training ---------------------------------------------------------------------------

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        """Distil `trained_depth` steps of drafting at every supervised row."""
        hidden = self.fc(seen.captured.to(self.fc.weight.dtype))
        outputs = self._unroll(batch, hidden)
        weight, sequences = row_weights(
            batch.answer, batch.document, steps=self.trained_depth, conf=self.loss_conf
        )
        # step i of row t is taught by the target's row t+1+i: move each there, so that all steps
        # share one row of the target's logits
        moved = [later(h, 1 + i) for i, h in enumerate(outputs)]
        weights = [later(weight[i], 1 + i) for i in range(self.trained_depth)]
        total, metrics = chunked_distillation(
            torch.stack([self.norm(h) for h in moved]).flatten(1, 2),
            seen.hidden.flatten(0, 1),
            draft_heads=[self.lm_head.weight],
            target_head=self._teacher_head[0],
            weight=torch.stack(weights).flatten(1, 2),
            labels=sooner(batch.ids, 1).flatten(),
            kept_ids=self.kept_ids,
            conf=self.loss_conf,
        )
        named = {
            f"{name}_{i + 1}": pair
            for name, steps in metrics.items()
            for i, pair in enumerate(steps)
        }
        return Loss(total=total, weight=sequences, metrics=named)

    def _unroll(self, batch: Batch, hidden: Float[Tensor, "b t h"]) -> list[Tensor]:
        embedded, mask = self.embed_tokens(batch.ids), batch.attends()
        keys, values, outputs = [], [], []
        for i in range(self.trained_depth):
            turn = self.rotary(hidden, batch.positions + i)
            query, key, value = self.midlayer.project(sooner(embedded, 1 + i), hidden, turn)
            keys.append(key)
            values.append(value)
            hidden = self.midlayer.finish(hidden, attend_unrolled(query, keys, values, mask))
            outputs.append(hidden)
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> State:
        weight = self.fc.weight
        groups, size = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, size)  # one more: the garbage slot
        return {
            "keys": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "values": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.config.hidden_size),
        }

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *, lengths: Int[Tensor, " b"],
        first: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        last = torch.arange(ids.shape[1], device=ids.device) == (lengths - 1)[:, None]
        tokens = torch.where(last, first[:, None], sooner(ids, 1))
        count, slots = ids.shape[1], state["keys"].shape[2]
        rows = torch.arange(count, device=ids.device).expand_as(ids)
        return self._read(
            state | {"lengths": torch.zeros_like(lengths)}, tokens, seen,
            rows=rows, mask=prompt_mask(lengths, count, slots), count=lengths,
        )  # fmt: skip

    def advance(
        self, state: State, ids: Int[Tensor, "b path"], *, count: Int[Tensor, " b"], seen: Seen
    ) -> State:
        lengths, slots = state["lengths"], state["keys"].shape[2]
        new = torch.arange(ids.shape[1], device=ids.device)
        causal = (new <= new[:, None]).expand(len(ids), -1, -1)
        rows = lengths[:, None] + new
        mask = tree_mask(lengths, causal, slots)
        return self._read(state, ids, seen, rows=rows, mask=mask, count=count)

    def _read(
        self, state: State, tokens: Int[Tensor, "b t"], seen: Seen, *, rows: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b 1 t s"], count: Int[Tensor, " b"],
    ) -> State:  # fmt: skip
        """Rows with true features; `count` of them are kept, the rest is written over later."""
        hidden = self.fc(seen.captured.to(self.fc.weight.dtype))
        # a row that has ended may stand at the last slots: what does not fit goes to garbage
        slots = rows.clamp_max(mask.shape[-1] - 1)
        hidden = self._layer(state, tokens, hidden, positions=rows, slots=slots, mask=mask)
        last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        kept = (count > 0)[:, None]  # rows without work keep what they had
        return state | {
            "lengths": state["lengths"] + count,
            "hidden": torch.where(kept, hidden.gather(1, last)[:, 0], state["hidden"]),
        }

    def propose(
        self, state: State, *, tree: Tree, rule: SamplingRule, noise: Tensor | None
    ) -> Proposal:
        lengths, slots = state["lengths"], state["keys"].shape[2]
        kept = self.kept_ids
        hidden = state["hidden"][:, None]
        sees = lengths.new_zeros((len(lengths), 1, max(tree.scratch, 1)), dtype=torch.bool)
        used = level = 0

        def scores(hidden: Tensor, level: int) -> Tensor:
            logits = self.lm_head(self.norm(hidden))
            if noise is None:
                return rule.scores(logits, None)
            here = noise[:, level] if kept is None else noise[:, level, kept]
            return rule.scores(logits, here[:, None].expand_as(logits))

        def expand(tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal hidden, sees, used, level
            ids = tokens + self.d2t[tokens]
            own = torch.arange(sees.shape[-1], device=ids.device)
            new = used + torch.arange(ids.shape[1], device=ids.device)
            sees = sees.gather(1, above[:, :, None].expand(-1, -1, sees.shape[-1]))
            sees = sees | (own == new[:, None])
            hidden = hidden.gather(1, above[:, :, None].expand(-1, -1, hidden.shape[-1]))
            hidden = self._layer(
                state, ids, hidden,
                positions=(lengths + level)[:, None].expand_as(ids),
                slots=(lengths[:, None] + new).clamp_max(slots - 1),
                mask=tree_mask(lengths, sees, slots),
            )  # fmt: skip
            used, level = used + ids.shape[1], level + 1
            return scores(hidden, level)

        grown = grow(tree, scores(hidden, 0)[:, 0], expand)
        return Proposal(ids=grown.ids + self.d2t[grown.ids], parents=grown.parents)

    def _layer(
        self, state: State, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """The layer over cached keys: writes at `slots`, reads through `mask`."""
        turn = self.rotary(hidden, positions)
        query, key, value = self.midlayer.project(self.embed_tokens(tokens), hidden, turn)
        where = places(state["keys"], slots)
        state["keys"][where], state["values"][where] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        return self.midlayer.finish(hidden, attended)

    # --- checkpoint -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is learned or chosen, by its published name.

        vLLM refuses the vocabulary maps beside a full vocabulary, so they are left out there.
        """
        maps = ("d2t", "t2d") if self.kept_ids is None else ()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in maps}

    def save(self, directory: Path, target: Target) -> None:
        dtype = target.head.weight.dtype
        tensors = {
            name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors().items()
        }
        metadata = {
            checkpoint.TARGET_HASH: target.fingerprint,
            checkpoint.TOKENIZER_HASH: target.tokenizer_fingerprint,
            "target_name": target.name,
            "seed": str(self.seed),
        }
        config = self.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        checkpoint.save(directory, tensors, config=config, metadata=metadata)

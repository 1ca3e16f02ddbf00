"""A draft model may be any causal LM with the target's tokenizer; test_pruned_layers.py cuts it from the target."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conf.entry import compose
from infer.engine.answers import generate_answers
from infer.engine.decode import Decoder
from models.drafts.causal_lm import CausalLMDraft
from models.drafts.options import CausalLMConf, InitFrom, LoraConf
from models.drafts.registry import build_draft, load_draft
from models.io.errors import UserError
from models.losses.config import LossConf, LossName
from models.targets.loading import freeze_model
from models.trees.sampling_config import SamplingConf
from models.trees.tree import NO_TREE
from tests.support.models.methods import choose_varied_text, measure_share_of_maximum
from tests.support.models.tiny import (
    CPU,
    VOCAB,
    batch_of,
    build_target,
    chain,
    learn,
    sampled_texts,
    tiny_config,
    tiny_target,
    tiny_tokenizer,
)
from train.__main__ import main
from train.checks import check_inputs
from train.config.run import TrainConf

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} end{% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def build_qwen3(*, vocab: int = VOCAB, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(4)
    sizes = {"vocab_size": vocab, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 48}
    return Qwen3ForCausalLM(tiny_config(**sizes, tie_word_embeddings=tied, initializer_range=0.02))


def save_model(model, folder, *, words: int = VOCAB, shards: str = "1GB"):
    """Save a checkpoint in the layout of hubs, with tokenizer and chat template."""
    tokenizer = tiny_tokenizer(words)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer.save_pretrained(folder)
    return folder


def build_from_path(target, folder, **conf) -> CausalLMDraft:
    return build_draft(CausalLMConf(path=str(folder), **conf), target, loss=LossConf(name=LossName.soft_ce), seed=0)


@pytest.mark.parametrize(("tied", "shards"), [(False, "10KB"), (True, "10KB"), (True, "1GB")])
def test_a_checkpoint_in_the_real_layout_is_distilled_and_saved_as_a_plain_checkpoint(target, tmp_path, tied, shards):
    model = build_qwen3(tied=tied)
    folder = save_model(model, tmp_path / "start", shards=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards == "10KB")
    draft = build_from_path(target, folder)
    assert torch.equal(draft.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    text = choose_varied_text(target)
    learn(draft, target, batch_of([text]), steps=300, lr=5e-3)
    assert measure_share_of_maximum(target, draft, text) >= 0.9

    draft.save(tmp_path / "checkpoint", target)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not any(info.values())
    ids = torch.tensor([text])
    torch.testing.assert_close(plain(ids).logits, draft.model(ids).logits)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    with safe_open(tmp_path / "checkpoint" / "model.safetensors", "pt") as file:
        assert file.metadata()["target_sha256"] == target.fingerprint


def test_adapters_alone_are_trained_and_merged_on_save(target, tmp_path):
    draft = build_from_path(target, save_model(build_qwen3(), tmp_path / "start"), lora=LoraConf(rank=4))
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    learn(draft, target, batch_of(sampled_texts(target, count=4, length=24)), steps=30)
    draft.save(tmp_path / "checkpoint", target)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(plain(ids).logits, draft.model(ids).logits)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert not torch.allclose(plain(ids).logits, before(ids).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(0, 19), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((19, 0), (8, 8)))]
)
def test_vocabularies_padded_differently_draft_the_same_tokens(ours, theirs, tmp_path):
    """Rows that the draft has beyond the target's are never proposed and never trained."""
    target = tiny_target(seed=0, padding=ours)
    draft = build_from_path(target, save_model(build_qwen3(vocab=VOCAB + theirs), tmp_path / "start"))
    text = choose_varied_text(target)
    learn(draft, target, batch_of([text]), steps=300)
    if theirs > ours:
        with torch.no_grad():
            draft.model.lm_head.weight[VOCAB:] = 9.0  # padding is untrained: it may be anything
    for temperature in (0.0, 1.0):
        sampling = SamplingConf(temperature=temperature, seed=1)
        plain, drafted = (
            Decoder(target, d, grown, sampling=sampling, slots=64).decode([text[:5]], row_ids=[0], max_new_tokens=30)[0]
            for d, grown in [(None, NO_TREE), (draft, chain(4))]
        )
        assert plain.ids == drafted.ids
    assert measure_share_of_maximum(target, draft, text) >= 0.9


def test_embeddings_that_end_before_the_tokenizer_are_refused(target, tmp_path):
    with pytest.raises(UserError, match="whose embeddings end before token 60"):
        build_from_path(target, save_model(build_qwen3(vocab=VOCAB - 8), tmp_path / "start"))


def test_a_draft_may_lack_the_row_of_an_added_token(tmp_path, caplog):
    """Gemma 3 of 1B has none for the image token that its tokenizer shares with the larger ones."""
    target, tokenizer = tiny_target(seed=0, padding=8), tiny_tokenizer(VOCAB)
    for part in (target.tokenizer, tokenizer):
        part.add_tokens(["<image>"], special_tokens=True)
    folder = save_model(build_qwen3(vocab=len(tokenizer) - 1), tmp_path / "start")
    tokenizer.save_pretrained(folder)
    with caplog.at_level("WARNING"):
        draft = build_from_path(target, folder)
    assert "no embedding of <image>" in caplog.text
    text = [5, len(tokenizer) - 1, 6, 7]
    plain, drafted = (
        Decoder(target, d, grown, sampling=SamplingConf(), slots=64).decode([text], row_ids=[0], max_new_tokens=20)
        for d, grown in [(None, NO_TREE), (draft, chain(4))]
    )
    assert plain[0].ids == drafted[0].ids


def test_what_a_padded_draft_writes_are_ids_of_the_target(tmp_path):
    """A language model that writes in the target's place draws none of its own rows of padding."""
    target = tiny_target(seed=0)
    draft = build_from_path(target, save_model(build_qwen3(vocab=VOCAB + 8), tmp_path / "start"))
    with torch.no_grad():
        draft.model.lm_head.weight[VOCAB:] = 9.0 * draft.model.lm_head.weight[:8].sign()
    sampling = SamplingConf(temperature=1.0, seed=1)
    answers = generate_answers(draft.as_language_model(), [[5, 6], [7]], max_new_tokens=40, sampling=sampling)
    assert all(max(ids) < VOCAB for _, ids in answers)


def test_a_token_that_the_target_has_no_embedding_for_need_not_be_the_drafts(tmp_path):
    target = freeze_model(build_qwen3(), tiny_tokenizer(VOCAB + 1), name="other", device=CPU)
    draft = build_draft(CausalLMConf(init_from=InitFrom.pruned, layers=[0]), target, loss=LossConf(), seed=0)
    draft.save(tmp_path, target)
    assert load_draft(tmp_path, target).vocab_size == VOCAB


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(target, tmp_path):
    folder = save_model(build_qwen3(), tmp_path / "start")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["7"], words["9"] = words["9"], words["7"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        build_from_path(target, folder)
    assert str(refused.value).startswith("draft.path: must have the target's tokenizer, got ")
    assert "where token 7 is '9' instead of '7'" in str(refused.value)


def test_a_smaller_tokenizer_is_refused_with_the_first_token_it_lacks(target, tmp_path):
    with pytest.raises(UserError, match="where token 50 is None instead of '50'"):
        build_from_path(target, save_model(build_qwen3(), tmp_path / "start", words=50))


@pytest.mark.no_shapes
def test_the_command_distils_from_local_folders_alone(tmp_path):
    """Target and draft come from local folders, and conversations pass through the chat template."""
    target = tiny_target(seed=0)
    save_model(target.model, tmp_path / "target", shards="20KB")
    save_model(build_qwen3(tied=True), tmp_path / "draft", shards="10KB")
    texts = [" ".join(map(str, text)) for text in sampled_texts(target, count=8, length=24)]
    chats = [[{"role": "user", "content": text[:12]}, {"role": "assistant", "content": text[12:]}] for text in texts]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    prompts = [{"id": str(i), "category": "a", "text": text[:12]} for i, text in enumerate(texts[:2])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    conf = compose(
        "train",
        TrainConf,
        [
            "draft=qwen3-1.7b",
            f"target.path={tmp_path}/target",
            f"draft.path={tmp_path}/draft",
            "data=jsonl",
            f"data.path={tmp_path}/chats.jsonl",
            "data.row_length=32",
            "optim.epochs=null",
            "optim.steps=4",
            "optim.rows_per_step=2",
            "interval.eval=4",
            "held_out.selection=1",
            f"evaluation.prompts={tmp_path}/prompts.jsonl",
            "evaluation.max_new_tokens=8",
            "device=cpu",
            "device.compile=false",
            "device.threads=1",
            "tree=mixed",
            "run_name=distilled",
            f"output_dir={tmp_path}/out",
        ],
    )
    main.__wrapped__(conf)
    report = json.loads((tmp_path / "out" / "distilled" / "report.json").read_text())
    modes = report["overall"]["modes"]
    assert len(modes) == 5
    assert all(mode["verdict"]["lossless"] == "yes" for mode in modes.values())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "distilled" / "checkpoint")
    assert plain.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "distilled" / "checkpoint")
    assert tokenizer.chat_template == TEMPLATE


def test_a_missing_local_model_is_a_single_line_with_the_remedy(tmp_path):
    """The line comes before the target is loaded."""
    (tmp_path / "rows.jsonl").write_text('{"text": "1 2 3"}\n')
    reachable, local = "without a network give a local copy by draft.path=DIR", "download the file"
    for override, key, name, remedy in [
        ("draft.path=null", "draft.name", "Qwen/Qwen3-1.7B", reachable),
        (f"draft.path={tmp_path}", "draft.path", str(tmp_path), local),
    ]:
        here = ["target=demo", f"data.path={tmp_path}/rows.jsonl"]
        conf = compose("train", TrainConf, ["draft=qwen3-1.7b", *here, override])
        with pytest.raises(UserError) as refused:
            check_inputs(conf)
        line = str(refused.value)
        assert line.startswith(f"{key}: must be a ")
        assert f", got '{name}' (" in line
        assert remedy in line
        assert "\n" not in line


def test_a_path_that_another_start_would_not_read_is_refused():
    with pytest.raises(UserError, match=r"^draft.path: must be null for draft.init_from=pruned, got x; to start"):
        CausalLMConf(init_from=InitFrom.pruned, path="x")


def test_experts_are_saved_by_the_names_of_published_files(tmp_path):
    """Transformers 5 stacks them in memory, and other readers know the published names alone."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    target = build_target(Qwen3MoeForCausalLM, tiny_config(Qwen3MoeConfig, **experts))
    conf = CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5])
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    draft.save(tmp_path, target)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if "layers.1.mlp.experts" in name}  # noqa: SIM118 # no mapping
    parts = ("gate_proj", "up_proj", "down_proj")
    assert names == {f"model.layers.1.mlp.experts.{n}.{part}.weight" for n in range(4) for part in parts}
    loaded = load_draft(tmp_path, target)
    pairs = zip(draft.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # of peft's own patterns
def test_adapters_of_experts_are_merged_into_what_is_saved(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    target = build_target(Qwen3MoeForCausalLM, tiny_config(Qwen3MoeConfig, **experts))
    conf = CausalLMConf(init_from=InitFrom.pruned, layers=[0, 5], lora=LoraConf(rank=2))
    draft = build_draft(conf, target, loss=LossConf(), seed=0)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    draft.save(tmp_path, target)
    ids = torch.arange(1, 9)[None]
    ours, theirs = (model.model(input_ids=ids).logits for model in (draft, load_draft(tmp_path, target)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layers_of_a_pretrained_draft_have_no_effect_which_a_line_tells(tmp_path, caplog):
    target = tiny_target(seed=0)
    build_draft(CausalLMConf(init_from=InitFrom.pruned, layers=[0, 3, 5]), target, loss=LossConf(), seed=0).save(
        tmp_path, target
    )
    with caplog.at_level("INFO"):
        draft = build_draft(CausalLMConf(path=str(tmp_path), layers=[0]), target, loss=LossConf(), seed=0)
    assert draft.lm.num_layers == 3
    assert "draft.layers=[0] has no effect" in caplog.text


def test_a_plain_checkpoint_is_evaluated_without_having_been_distilled(target, tmp_path):
    """The model before distillation is the checkpoint of its publisher."""
    draft = load_draft(save_model(build_qwen3(), tmp_path / "plain", shards="10KB"), target)
    assert isinstance(draft.rebuild_untrained(target), str)
    assert draft.method == "causal_lm"

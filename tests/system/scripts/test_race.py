"""Both sides of a race train on the same documents, and its tables show their acceptance."""

import json

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

from conf.entry import compose
from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.rows import TokenizedDocument
from models.drafts.eagle3 import NORM_SWITCHES
from models.io.errors import UserError
from models.losses.config import LossConf
from models.losses.loss_weights import position_weights
from scripts.benchmarks.tables import PAGE, markdown, replaced
from scripts.race.documents import ALL, SUMMARY, load_peer, read_documents, split_documents, write_documents
from scripts.race.runs import MATCHED, OURS, PEER, Race, Run
from scripts.race.tables import build_tables, choose_setting
from scripts.race.training import our_overrides, peer_command, read_our_cost, read_peer_cost, sum_costs
from tests.support.data.packed import packed_of
from tests.support.models.tiny import LAYERS, batch_of, new_draft, sampled_texts
from train.config.run import TrainConf

# tokens, rounds and rounds that accepted at least 1, 2, 3, 4 draft tokens
POOR, FAIR, GOOD = [10, 10, 0, 0, 0, 0], [15, 10, 5, 0, 0, 0], [20, 10, 5, 3, 1, 1]


@pytest.fixture
def texts(target):
    return sampled_texts(target, count=3, length=12)


def test_the_peer_gets_the_tokens_answers_and_states_of_every_document(target, texts, tmp_path):
    rows = packed_of(batch_of(texts))
    for _ in range(2):  # a second call goes over what a stopped one has left
        write_documents(split_documents(rows), tmp_path, target=target, layers=LAYERS, step_tokens=24)

    assert read_documents(tmp_path) == texts
    assert json.loads((tmp_path / SUMMARY).read_text()) == {"layers": LAYERS, "lengths": [12] * 3, "step_tokens": 24}
    for name, mask in {"answers": [0] * 4 + [1] * 8, "all": [1] * 11 + [0]}.items():
        data = load_from_disk(tmp_path / name).with_format(None)
        assert data["input_ids"][:] == texts
        assert data["loss_mask"][:] == [mask] * 3
        for number, ids in enumerate(texts):
            tensors = load_file(tmp_path / name / "hidden_states" / f"hs_{number}.safetensors")
            assert tensors["token_ids"].tolist() == ids
            assert_states(target.model, ids, tensors["hidden_states"])


@pytest.mark.parametrize("length", [10, 16, 40, 128])
def test_the_matched_peer_learns_as_many_tokens_as_ours_in_rows_of_any_length(length):
    """The peer drops the first entry of a document's mask; tokens that a piece repeats are learned once."""
    answer = [False] * 5 + [True] * 60
    texts = [TokenizedDocument(ids=[*range(n)], answer=answer[:n]) for n in (65, 30, 7, 12)]
    rows, _ = pack_documents(Documents.from_documents(texts), length, overlap=4)
    weights, _ = position_weights(rows.batch([*range(len(rows))]), steps=1, conf=LossConf(on_prompts=True))
    theirs = [sum(document.loss_mask(ALL)[1:]) for document in split_documents(rows)]
    assert sum(theirs) == (weights > 0).sum() > 90


def assert_states(model, ids, states):
    """Check that states are the layers' inputs as transformers gives them, and the last give the logits."""
    output = model(torch.tensor([ids]), output_hidden_states=True)
    for index, layer in enumerate(LAYERS):
        torch.testing.assert_close(states[:, index], output.hidden_states[layer][0])
    logits = model.lm_head(model.model.norm(states[:, len(LAYERS)]))
    torch.testing.assert_close(logits, output.logits[0])


@pytest.mark.parametrize("vocab_size", [None, 20])
def test_a_checkpoint_of_the_peer_gives_the_logits_of_the_same_tensors(target, texts, tmp_path, vocab_size):
    ours = new_draft(target, **dict.fromkeys(NORM_SWITCHES, True), vocab_size=vocab_size)
    if vocab_size:
        ours.set_vocabulary(torch.arange(1, 2 * vocab_size, 2), target)
    with torch.no_grad():  # norms of ones would hide a swapped name
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_as_peer(ours, tmp_path)
    batch = batch_of(texts)
    target_output = target.forward_hidden(
        batch.input_ids, positions=batch.positions, mask=batch.attention_mask(), layers=LAYERS
    )

    def logits(draft):
        outputs = draft.unroll_steps(batch, draft.target_features(target_output))
        return [draft.logits(output) for output in outputs[:2]]

    with torch.no_grad():
        torch.testing.assert_close(logits(load_peer(tmp_path, target)), logits(ours))


def save_as_peer(draft, folder):
    tensors = draft.checkpoint_tensors()
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    layer = {
        name: getattr(draft.config, name)
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    config = {"eagle_aux_hidden_state_layer_ids": LAYERS, "transformer_layer_config": layer}
    config |= dict.fromkeys(NORM_SWITCHES, True)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def race(tmp_path):
    """Return a race with two rates of each side, and two seeds of those that calibration prefers."""
    race = new_race(tmp_path)
    race.save()
    for side, counts in {OURS: GOOD, PEER: FAIR, MATCHED: GOOD}.items():
        add_run(race, side, rate=0.01, seed=0, calibration=GOOD, evaluated=counts)
        add_run(race, side, rate=0.01, seed=1, evaluated=counts)
        add_run(race, side, rate=0.03, seed=0, calibration=POOR, evaluated=GOOD)
        race.documents(0).mkdir(exist_ok=True)
        race.share_documents()
        add_run(race.short, side, rate=0.01, seed=0, evaluated=counts)
    return race


def new_race(folder, steps=400):
    return Race(
        output=folder, target=None, prompts=None, calibration=None, steps=steps, overrides=[], peer_overrides=["--x=1"]
    )


def add_run(race, side, *, rate, seed, evaluated, calibration=None):
    switch = "draft.dropout=0" if side == OURS else ""
    run = Run(race=race, side=side, switch=switch, rate=rate, seed=seed)
    run.add_figures(
        side=side, switch=switch, rate=rate, seed=seed, steps=race.steps, tokens=20 * race.steps, tokens_per_s=300.0
    )
    run.add_figures(peak_bytes=3 * 2**20, runtime={"3": [evaluated[:5]] * 9, "4": [evaluated] * 9})
    if calibration:
        run.add_figures(calibration={"4": [calibration] * 9})


def test_a_setting_is_chosen_on_prompts_that_are_not_evaluated(race):
    assert choose_setting(race.list_figures(), PEER) == ("", 0.01)  # the other is better on the evaluated prompts


def test_the_tables_compare_the_chosen_runs(race):
    acceptance, settings, cost = build_tables(race)
    assert acceptance.rows[3:] == [
        ["ours", "4", "2.00, 2.00", "2.00", "", "0.50 0.30 0.10 0.10"],
        ["speculators", "4", "1.50, 1.50", "1.50", "+0.50 [+0.50, +0.50]", "0.50 0.00 0.00 0.00"],
        ["speculators, our mask and steps", "4", "2.00, 2.00", "2.00", "+0.00 [+0.00, +0.00]", "0.50 0.30 0.10 0.10"],
    ]
    tried = "draft.dropout=0 0.01: 2.00, draft.dropout=0 0.03: 1.00"
    assert settings.rows[0] == ["ours", tried, "draft.dropout=0 0.01", "400", "8,000, 8,000"]
    assert cost.rows[0] == ["ours", "60", "300", "3"]
    assert race.short.documents(0).resolve() == race.documents(0)


def test_a_race_without_runs_has_no_tables(tmp_path):
    assert build_tables(new_race(tmp_path)) == []


def test_another_race_needs_another_folder(race):
    with pytest.raises(UserError, match="--output: must be another folder"):
        new_race(race.output, steps=200).save()


def test_the_page_has_markers_for_the_tables_of_both_targets(race):
    text = markdown(*build_tables(race), setting="a machine")
    for name in ("race-demo", "race-wide"):
        assert text in replaced(PAGE.read_text(), name, text)


def test_the_peer_trains_for_all_steps_on_all_documents_but_the_last(race):
    documents = race.documents(0)
    (documents / SUMMARY).write_text(json.dumps({"layers": LAYERS, "lengths": [4096, 2048, 99], "step_tokens": 2048}))
    run = Run(race=race, side=PEER, switch="", rate=0.01, seed=0)
    assert run.count_epochs() == 134  # of three steps each
    assert run.checkpoint == run.folder / "133"


def test_the_peer_runs_as_it_is_and_with_our_mask_and_steps(race, tmp_path, monkeypatch):
    (tmp_path / ".ready-peer").touch()
    monkeypatch.setenv("SPECULATORS", str(tmp_path))
    documents = race.documents(0)
    (documents / SUMMARY).write_text(json.dumps({"layers": LAYERS, "lengths": [4096, 9], "step_tokens": 2048}))
    (documents / "d2t.npy").touch()
    plain, matched = (
        peer_command(Run(race=race, side=side, switch="--y=2", rate=0.01, seed=0)) for side in (PEER, MATCHED)
    )
    conf = compose("train", TrainConf, our_overrides(Run(race=race, side=OURS, switch="", rate=0.01, seed=0)))
    assert {*matched} - {*plain} == {
        f"--ttt-steps={conf.draft.ttt_steps}",
        f"--data-path={documents}/all",
        f"--save-path={race.output}/matched---y=2-0.01-seed0",
    }
    assert conf.loss.on_prompts
    assert {f"--data-path={documents}/answers", f"--d2t-path={documents}/d2t.npy", "--y=2", "--x=1"} <= {*plain}


def test_both_sides_count_the_same_steps(tmp_path):
    """Tokens are summed over all steps, and the speed is that of the steps after the tenth."""
    ours = [
        {"step": 10, "train/tokens": 100.0, "train/tokens_per_s": 1.0},
        {"step": 20, "train/tokens": 400.0, "train/tokens_per_s": 100.0},
        {"step": 20, "eval/acceptance_length": 2.0},
        {"step": 30, "train/tokens": 600.0, "train/tokens_per_s": 50.0},
    ]
    speeds = [10.0] * 10 + [400.0] * 5 + [200.0] * 5 + [1.0]  # the last step is extra
    peers = [
        {"global_step": step, "profile": {"step_ms": 500.0, "tokens_per_s": speed}} for step, speed in enumerate(speeds)
    ]
    for name, records in {"metrics": ours, "steps": [*peers, {"val": {}, "epoch": 0}]}.items():
        lines = [json.dumps(record) for record in records]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert sum_costs(read_our_cost(tmp_path), 20) == {"tokens": 400, "tokens_per_s": 100}
    assert sum_costs(read_our_cost(tmp_path), 30)["tokens_per_s"] == 500 / 7
    assert sum_costs(read_peer_cost(tmp_path), 20) == {"tokens": 1550, "tokens_per_s": 300}

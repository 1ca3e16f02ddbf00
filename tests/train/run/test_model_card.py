"""The model card of a checkpoint tells how to serve the draft, and agrees with the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file

from conf.entry import compose
from data.config import DataConf, DataSource
from data.feature_capture import capture_features
from data.sources.prepared_rows import PreparedRow, write_prepared_rows
from infer.results.schema import LosslessVerdict
from models.targets.config import DEMO_TARGET
from tests.support.data import captured as captured_store
from tests.support.reports.cards import read_card, read_serve_line
from tests.support.reports.sample_reports import build_comparison_report, build_draft_report, with_mode, with_modes
from train.config.run import TrainConf
from train.run.model_card import describe_data_license, write_model_card

OWN = "Answers stay the target's own"


def write_card(
    folder: Path, *overrides: str, report=None, adapted=None, target=None, data=None, best_step=None, vocab=300
):
    """Write and read the card of a run with these settings and this report."""
    checkpoint = folder / "checkpoint"
    (checkpoint / (adapted or "")).mkdir(parents=True)
    lines = [
        {"step": step, "train/tokens": 80.0 * step / 9, "train/answer_tokens": 40.0 * step / 9, "train/epochs": 2.0}
        for step in (3, 9)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 300}))
    if best_step is not None:
        (folder / "state" / "00000009").mkdir(parents=True)
        progress = json.dumps({"progress": {"best_step": best_step}})
        (folder / "state" / "00000009" / "progress.json").write_text(progress)
    save_file({"w": torch.zeros(1)}, checkpoint / "model.safetensors", {"target_sha256": "ab12"})
    conf = compose("train", TrainConf, ["draft=qwen3-8b-eagle3", *overrides])
    conf.target.path, conf.data.path = target, data or conf.data.path
    write_model_card(conf, report or build_draft_report(), folder, target_vocab=vocab)
    return read_card(checkpoint)


def select_draft(report, index: int, **fields):
    """Return the report with only the draft of this index."""
    return replace(report, drafts=[replace(report.drafts[index], **fields)])


@pytest.fixture(scope="module")
def exact():
    """Build the report of a draft whose answers are all those of the target."""
    return with_mode(build_draft_report(), "eagle3-demo/tree", lossless=LosslessVerdict.yes, mismatched_prompts=0)


def test_a_draft_of_a_public_target_names_it_and_its_data(tmp_path, exact):
    card = write_card(tmp_path, report=exact)
    assert card.data.base_model == read_serve_line(card)[0] == "Qwen/Qwen3-8B"
    assert card.data.datasets == ["HuggingFaceH4/ultrachat_200k"]
    assert "verifies. eagle3-demo, tree: " in card.text
    assert OWN in card.text


def test_the_card_of_the_demo_shows_a_path_of_its_machine_only_in_the_command(tmp_path, exact):
    card = write_card(tmp_path, "draft=demo", report=exact)
    assert "verifies" in card.text
    assert "draft for demo" in card.text
    assert card.text.count(str(DEMO_TARGET)) == 1  # in the command


@pytest.mark.parametrize(
    ("draft", "of"), [("qwen3-8b-eagle3", "Qwen/Qwen3-8B"), ("qwen3-32b-eagle3", "Qwen/Qwen3-32B"), ("demo", None)]
)
def test_a_draft_of_a_fine_tune_is_served_with_it(tmp_path, draft, of):
    """It is not served with the public model that the fine-tune starts from."""
    mine = tmp_path / "my target"
    mine.mkdir()
    overrides = [f"draft={draft}", "data=jsonl"]
    card = write_card(tmp_path / "run", *overrides, target=str(mine), data="rows.jsonl")
    assert read_serve_line(card)[0] == str(mine)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert (f"`{mine}` (a local copy or fine-tune of {of})" in card.text) == (of is not None)


def test_the_training_is_a_table_with_a_row_for_each_fact(tmp_path):
    card = write_card(tmp_path, "data=jsonl", data="a|b.jsonl")
    html = MarkdownIt("commonmark").enable("table").render(card.text)
    trained = html.split("<h2>Trained</h2>")[1].split("</table>")[0]
    assert trained.count("<tr>") == 9
    assert "<td>a|b.jsonl</td>" in trained
    assert "<td>80, of which 40 of answers; 2.00 epochs in 9 steps</td>" in trained


@pytest.mark.parametrize("licenses", [["MIT"], ["MIT", "Apache-2.0"], [""]])
def test_the_license_of_the_data_is_that_recorded_by_the_mixture(tmp_path, licenses):
    rows = [PreparedRow(id="a", source="mine", license=name, text="a text") for name in licenses for _ in range(7)]
    (tmp_path / "rows").mkdir()
    write_prepared_rows(tmp_path / "rows" / "train-00000.parquet", rows, {})
    card = write_card(tmp_path / "run", "data=prepared", f"data.path={tmp_path / 'rows'}")
    license_line = ", ".join(f"{name or 'not recorded'} (7 rows)" for name in licenses)
    assert f"| license of the data | {license_line} |" in card.text


@pytest.mark.parametrize(
    ("overrides", "license_name"),
    [
        ([], "MIT"),
        (["data.path=a.jsonl", "data.split=train"], "not recorded"),
        (["data=jsonl", "data.path=a.jsonl"], "not recorded"),
        (["data=jsonl", "data.path=a.jsonl", "data.license=CC-BY-4.0"], "CC-BY-4.0"),
    ],
)
def test_data_that_was_not_prepared_has_the_license_of_its_settings(tmp_path, overrides, license_name):
    assert f"| license of the data | {license_name} |" in write_card(tmp_path, *overrides).text


def test_the_serving_command_and_its_figures_are_of_the_same_chain(tmp_path, exact):
    chain = exact.overall.modes["eagle3-demo/chain"].figures
    card = write_card(tmp_path, report=exact)
    assert read_serve_line(card)[1]["num_speculative_tokens"] == chain.depth
    assert f"One of {chain.depth} tokens was {chain.speedup.mean:.2f} [" in card.text
    assert "does not pay" not in card.text


@pytest.mark.parametrize(("nodes", "served"), [(2, 2), (6, 5)])
def test_the_serving_command_has_the_depth_of_a_tuned_chain_and_not_of_a_tuned_tree(tmp_path, exact, nodes, served):
    modes = exact.overall.modes
    report = with_mode(
        with_modes(exact, modes | {"eagle3-demo/tuned": modes["eagle3-demo/chain"]}),
        "eagle3-demo/tuned",
        depth=2,
        nodes=nodes,
    )
    card = write_card(tmp_path, report=select_draft(report, 0, tuned_tree="in words"))
    assert read_serve_line(card)[1]["num_speculative_tokens"] == served
    assert f"One of {served} tokens was " in card.text


@pytest.mark.parametrize("tuned_tree", ["n-gram lookup alone, 8 tokens", "no speculation"])
def test_the_serving_section_says_if_the_tuner_chose_not_to_use_the_draft(tmp_path, exact, tuned_tree):
    modes = exact.overall.modes
    chain = modes["eagle3-demo/chain"].figures
    report = with_mode(
        with_modes(exact, modes | {"eagle3-demo/tuned": modes["ngram"]}),
        "eagle3-demo/chain",
        speedup=replace(chain.speedup, mean=0.6),
    )
    card = write_card(tmp_path, report=select_draft(report, 0, tuned_tree=tuned_tree))
    serving = card.text.split("## Serve")[1].split("vllm serve")[0]
    assert "0.60 [" in serving
    assert "there it does not pay" in serving
    assert f"The fastest decoding there does not use this draft: {tuned_tree}." in serving


@pytest.mark.parametrize("index", [0, 1, 2])
def test_answers_are_called_the_targets_own_only_where_the_report_does(tmp_path, index):
    """The drafts are a usual draft, a draft with an adapted target, and a draft with a lossy rule."""
    report = select_draft(build_comparison_report(), index)
    adapted = "target-0123abcd" if index == 1 else None
    card = write_card(tmp_path, report=report, adapted=adapted)
    assert (OWN in card.text) == (index == 0)
    assert ("same output as its adapted target" in card.text) == (index == 1)
    if adapted:
        assert "| yes (own) |" in card.text
        assert f"answers are those of `{adapted}` in this folder, which differ from" in card.text
        assert read_serve_line(card)[0] == f"THIS_FOLDER/{adapted}"
    assert ("other output, as the typical rule is lossy" in card.text) == (index == 2)


def test_the_card_of_an_adapted_target_says_nothing_of_answers_where_the_verdict_is_no(tmp_path):
    report = select_draft(build_comparison_report(), 1)
    key = f"{report.drafts[0].name}/tree"
    report = with_mode(report, key, lossless=LosslessVerdict.no, mismatched_prompts=3)
    card = write_card(tmp_path, report=report, adapted="target-0123abcd")
    assert "NOT the same output as its adapted target: 3 of " in card.text
    assert "answers are those of" not in card.text


def test_the_card_of_a_draft_that_took_no_round_names_no_speed(tmp_path, exact):
    card = write_card(tmp_path, report=with_mode(exact, "eagle3-demo/chain", speedup=None))
    assert "Engines draft a chain. None was measured: no answer took a round." in card.text


def test_both_stages_of_a_training_are_on_the_card(tmp_path):
    (tmp_path / "first_stage").mkdir()
    line = {"step": 4, "train/tokens": 3072.0, "train/answer_tokens": 1.0, "train/epochs": 2.0}
    (tmp_path / "first_stage" / "metrics.jsonl").write_text(json.dumps(line))
    card = write_card(tmp_path, "draft=qwen3-8b-medusa2", "optim.lr=1e-3")
    assert "| first stage | medusa on the same data: 3,072 tokens in 4 steps, adamw, rate 0.004, " in card.text
    assert "| recipe | adamw, rate 0.001, " in card.text
    alone = write_card(tmp_path / "alone", "draft=qwen3-8b-medusa2")
    assert "| first stage | not recorded |" in alone.text


def test_the_license_of_a_store_is_that_of_the_data_it_was_captured_from(tmp_path, target):
    capture = captured_store.conf(captured_store.written(tmp_path, target), limit=3)
    capture_features(replace(capture, data=replace(capture.data, license="CC0-1.0")), command="")
    data = DataConf(source=DataSource.captured, path=f"{capture.output_dir}/{capture.run_name}")
    assert describe_data_license(data) == "CC0-1.0"
    assert describe_data_license(replace(data, license="MIT")) == "MIT"


@pytest.mark.parametrize(
    ("best_step", "line"),
    [
        (3, "<td>27, of which 13 of answers; 2.00 epochs in 3 steps of 9, the best by its evaluations</td>"),
        (9, "9 steps<"),
    ],
)
def test_the_training_of_the_card_ends_with_the_step_of_its_checkpoint(tmp_path, best_step, line):
    html = MarkdownIt("commonmark").enable("table").render(write_card(tmp_path, best_step=best_step).text)
    assert line in html


def test_the_revision_that_was_trained_for_is_named_and_served(tmp_path):
    card = write_card(tmp_path, "target.revision=abc123")
    assert "`Qwen/Qwen3-8B` at revision `abc123` verifies" in card.text
    assert "vllm serve Qwen/Qwen3-8B --revision abc123 --speculative-config" in card.text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "It holds parts of the target and"),
        (["draft=qwen3-1.7b"], "It is `Qwen/Qwen3-1.7B`, trained further on the data"),
        (["draft=qwen3-1.7b", "draft.init_from=random"], "It holds no weight of the target, but learned"),
    ],
)
def test_the_licenses_that_bind_a_draft_follow_from_what_it_holds(tmp_path, overrides, line):
    assert line in write_card(tmp_path, *overrides).text.split("## License")[1]


@pytest.mark.parametrize("vocab", [300, 304])
def test_a_draft_model_of_another_vocabulary_size_is_not_called_servable(tmp_path, vocab):
    card = write_card(tmp_path, "draft=qwen3-1.7b", vocab=vocab)
    assert ("refuse a draft model whose vocabulary" in card.text) == (vocab == 304)

"""A first run on a user's own target describes its data, and refuses mistakes before weights are read."""

import json
import logging
import shlex
import shutil
import sys
from collections import Counter

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

import data.capture
import data.prepare
import infer.plan
import train.__main__
import train.first_lines
import train.plan
from conf.drafts import list_options
from conf.entry import compose
from data.config import DataSource, TurnSelection
from data.document_cache import read_documents
from data.prepare_config import PrepareConf
from data.preview import preview_data
from data.sources.training_rows import read_training_rows
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer
from tests.support.commands.own_target import save_conversations, save_target
from tests.support.commands.pages import commands
from train.checks import check_inputs
from train.config.run import TrainConf, TrainPlanConf
from train.first_lines import announce_recipe, describe_data, prepare_command

LAPTOP = "smollm2-135m"  # its drafts have no public data: they learn from answers of the target
REAL = [
    name for group, name, _ in list_options(TrainConf) if group == "draft" and not name.startswith(("demo", LAPTOP))
]
SMALL = (
    "data.row_length=128 optim.epochs=null optim.steps=2 optim.rows_per_step=2 draft.ttt_steps=2 interval.eval=2 "
    "held_out.selection=2 device=cpu device.compile=false device.threads=1 tree=chain tree.depth=3"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a target with Qwen3's template, targets that no command may load, and a target without a template."""
    folder = tmp_path_factory.mktemp("own")
    save_target(folder / "target")
    save_target(folder / "unread", weights=False)
    save_target(folder / "llama", family="llama-3.1", weights=False)
    shutil.copytree(folder / "unread", folder / "plain")
    (folder / "plain" / "chat_template.jinja").unlink()
    save_conversations(folder / "rows.jsonl", count=24)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Return a function that runs a command in the folder and returns exit code and output."""
    monkeypatch.chdir(folder)

    def run(main, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [main.__module__, *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capfd.readouterr()
        return code, out.err if code else out.out

    return run


def build_conf(*overrides: str) -> TrainConf:
    return compose("train", TrainConf, list(overrides))


@pytest.mark.parametrize("draft", REAL)
def test_every_real_draft_has_public_data_that_the_command_line_overrides(draft):
    public = build_conf(f"draft={draft}").data
    assert public.path == "HuggingFaceH4/ultrachat_200k"
    assert (public.row_length, public.turns) == (2048, TurnSelection.auto)
    for order in ([f"draft={draft}", "data=jsonl"], ["data=jsonl", f"draft={draft}"]):
        assert build_conf(*order, "data.path=rows.jsonl").data.source is DataSource.jsonl
    assert build_conf(f"draft={draft}", "data=sharegpt").data.path.startswith("Aeala/")
    assert build_conf(f"draft={draft}", "experiment=demo-long").data.path == public.path


def test_a_run_over_several_turns_describes_its_data_and_ends_in_a_report(run, folder):
    code, output = run(
        train.__main__.main,
        *(
            "draft=qwen3-8b-eagle3 target.path=target data.path=rows.jsonl run_name=first "
            "evaluation.prompts_per_category=1 evaluation.max_new_tokens=4 data=ultrachat evaluation.batch_sizes=[]"
        ).split(),
        *SMALL,
    )
    assert code == 0
    first = output.splitlines()
    assert first[0] == (
        "training data: rows.jsonl; conversations; one document per turn, because the "
        "chat template rewrites earlier turns; packed into rows of 128 tokens"
    )
    assert first[1].startswith("these answers are not known to be the target's own")
    (prepare,) = commands("\n".join(first[2:4]))
    assert prepare.module == "data.prepare"
    assert first[5] == "    data=prepared data.path=outputs/prepare/first-own run_name=first-own"
    assert (folder / "outputs/train/first/report.json").exists()


def test_the_printed_command_composes_to_this_target_and_these_prompts():
    typed = [
        "draft=qwen3-1.7b",
        "data=jsonl",
        'data.path="my rows,1.jsonl"',
        "data.column=chat",
        "data.limit=50",
        "+data.template.enable_thinking=false",
        "target.path=/models/mine",
        "run_name=mine",
    ]
    mine = build_conf(*typed)
    prepared = compose("prepare", PrepareConf, shlex.split(prepare_command(mine))[3:])
    (source,) = prepared.mixture.sources.values()
    assert (source.path, source.limit) == ("my rows,1.jsonl", 50)
    assert source.columns == {"messages": "chat"}
    assert source.template == {"enable_thinking": False}
    assert prepared.answers.source.value == "target"
    assert prepared.target == mine.target
    assert f"{prepared.output_dir}/{prepared.run_name}" == "outputs/prepare/mine-own"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved", "splits", "many"])
def test_a_local_copy_needs_nothing_but_its_path(folder, name, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    table = datasets.Dataset.from_list([json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()])
    table.to_parquet(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=table).save_to_disk(folder / "splits")
    (folder / "many").mkdir(exist_ok=True)
    table.to_parquet(folder / "many" / "part-0.parquet")
    conf = build_conf("draft=qwen3-1.7b", f"data.path={folder / name}")
    assert len(list(read_training_rows(conf.data, Counter()))) == 24


@pytest.mark.parametrize(("target", "documents"), [("unread", 48), ("llama", 24)])
def test_automatic_turns_are_those_that_the_template_can_render(folder, target, documents):
    """Qwen3's template rewrites earlier turns, Llama's keeps them; either way each turn is learned once."""
    rows = build_conf("data=jsonl", f"data.path={folder / 'rows.jsonl'}")
    source = TargetConf(path=str(folder / target))
    documents_read = read_documents(rows.data, load_tokenizer(source))
    assert len(documents_read) == documents
    description = preview_data(rows.data, source).turns
    assert ("rewrites" in description) == (target == "unread")
    rows.data.turns = TurnSelection.each
    assert preview_data(rows.data, source).turns == "one document per turn"
    each = read_documents(rows.data, load_tokenizer(source))
    assert documents_read.answer.sum() == each.answer.sum()


@pytest.mark.parametrize("fault", ["raise_exception('no')", "messages[0].content.index('zz')"])
def test_a_template_that_rejects_every_row_is_refused_with_its_message(folder, tmp_path, fault):
    copy = tmp_path / "target"
    shutil.copytree(folder / "unread", copy)
    (copy / "chat_template.jinja").write_text("{{ " + fault + " }}")
    rows = build_conf("data=jsonl", f"data.path={folder / 'rows.jsonl'}").data
    with pytest.raises(UserError, match=r"rejected by the chat template: .* at .*rows.jsonl:\d"):
        preview_data(rows, TargetConf(path=str(copy)))


def test_ids_of_another_tokenizer_are_refused_before_weights_are_read(folder, tmp_path):
    file = tmp_path / "ids.jsonl"
    lines = [{"ids": ids, "answer": [False, True]} for ids in ([1, 2], [1, 10**6])]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = build_conf("data=jsonl", f"data.path={file}").data
    with pytest.raises(UserError, match=rf"got 1000000 at {file}:2"):
        preview_data(rows, TargetConf(path=str(folder / "unread")))


REFUSED = {
    "target.path=unread data.turns=all": "data.turns: the chat template must not rewrite earlier",
    "target.path=plain": "data.format: conversations must meet a target with a chat template",
    "target.path=unread data=prepared": "data.path: must be set for data.source=prepared, got null",
    "target.path=unread data.path=none.jsonl": "data.path: must exist, got 'none.jsonl'",
    "target.path=none": "target.path: must be a reachable model, got 'none' (no such directory)",
}


@pytest.mark.parametrize("main", [train.__main__.main, data.capture.main])
@pytest.mark.parametrize("mistake", REFUSED)
def test_data_that_do_not_fit_are_refused_before_weights_are_read(mistake, main, run):
    """Loading the target would be refused for its weights, which are NaN."""
    overrides = ["draft=qwen3-8b-eagle3", *SMALL[:1], "device=cpu"]
    path = [] if "data" in mistake.replace("data.turns", "") else ["data.path=rows.jsonl"]
    code, error = run(main, *overrides, *path, *mistake.split())
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {REFUSED[mistake]}")


def test_prepare_refuses_a_target_without_a_template_before_weights_are_read(run):
    code, error = run(
        data.prepare.main,
        "mixture=one",
        "mixture.sources.rows.path=rows.jsonl",
        "answers=target",
        "mixture.exclude=[]",
        "target.path=plain",
        "run_name=plain",
    )
    assert (code, error.splitlines()[-1][:45]) == (2, "error: target.name: must have a chat template")


def test_prepare_refuses_an_incomplete_target_before_rows_are_read(run, folder):
    shutil.copytree(folder / "target", folder / "headless")
    weights = folder / "headless" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    code, error = run(
        data.prepare.main,
        "mixture=one",
        "mixture.sources.rows.path=rows.jsonl",
        "answers=target",
        "mixture.exclude=[]",
        "target.path=headless",
        "run_name=headless",
    )
    assert code == 2
    assert error.startswith("error: target.path: must have the tensors that its config.json desc")
    assert not (folder / "outputs" / "prepare" / "headless").exists()


@pytest.mark.parametrize("main", [train.__main__.main, data.capture.main])
def test_without_a_hub_a_single_line_names_every_missing_file(main, run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, error = run(main, "draft=qwen3-1.7b")
    assert (code, error.count("\n")) == (2, 1)
    for remedy in ("target.path=DIR", "draft.path=DIR", "data.path=FILE"):
        assert remedy in error


def test_a_data_set_is_loaded_once_and_not_before_the_target(folder, monkeypatch):
    import datasets

    loaded, lines = [], (folder / "rows.jsonl").read_text().splitlines()

    def load(path, **_):
        loaded.append(path)
        return datasets.Dataset.from_list([json.loads(line) for line in lines])

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    overrides = ["data=ultrachat", "data.path=someone/rows"]
    with pytest.raises(UserError, match=r"^target\.path: must be a reachable model"):
        check_inputs(build_conf(*overrides, f"target.path={folder / 'none'}"))
    assert loaded == []
    mine = build_conf(*overrides, f"target.path={folder / 'unread'}")
    assert "someone/rows (train_sft); conversations" in describe_data(mine.data, check_inputs(mine))
    assert loaded == ["someone/rows"]


def test_the_demos_data_are_refused_for_another_target_unless_allowed(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"^data.source: the demo's prompts .* got target target;"):
        check_inputs(build_conf("target.path=target"))
    allowed = build_conf("target.path=target", "data.demo.for_any_target=true")
    with caplog.at_level(logging.INFO, logger="train.first_lines"):
        train.first_lines.announce_data(allowed, check_inputs(allowed))
    assert "these are the demo's prompts, answered by target" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "is_advised"),
    [
        ("draft=qwen3-8b-eagle3", True),  # 10 epochs, steps of 8 rows
        ("draft=qwen3-8b-eagle3 optim.epochs=null optim.steps=9999", True),
        ("draft=qwen3-8b-eagle3 optim.epochs=null optim.steps=10000", False),
        ("draft=qwen3-8b-eagle3 recipe=few_answers", False),
        ("draft=qwen3-8b-eagle3 device=xla", False),  # which refuses Muon
        ("draft=qwen3-8b-medusa", False),
        ("draft=demo", False),
    ],
)
def test_an_eagle3_layer_with_few_steps_names_the_recipe_that_learns_more_from_them(overrides, is_advised, caplog):
    with caplog.at_level(logging.INFO, logger="train.first_lines"):
        announce_recipe(compose("train", TrainConf, overrides.split()), num_rows=500)
    assert ("learns more by recipe=few_answers (docs" in caplog.text) == is_advised


def test_a_store_of_the_demos_prompts_is_refused_with_the_command_that_answers_them(run):
    code, error = run(data.capture.main, "data=demo", "target.path=unread")
    assert code == 2
    assert error.startswith("error: data.source: must be documents, got demo; run `python -m data.")


@pytest.mark.parametrize("choice", ["data=prepared", "data=captured data.path=none"])
def test_a_plan_needs_no_data(choice, run):
    code, output = run(
        train.plan.main,
        *"draft=qwen3-8b-medusa machine=trn2.3xlarge target.path=unread data.row_length=128".split(),
        *choice.split(),
    )
    assert code == 0, output
    assert ("no feature store there" in output) == ("captured" in choice)


@pytest.mark.parametrize("data", ["ultrachat", "sharegpt", "jsonl", "prepared", "captured"])
def test_a_plan_takes_rows_of_2048_tokens_where_no_other_length_is_set(data):
    planned = compose("train_plan", TrainPlanConf, ["draft=qwen3-32b-eagle3", f"data={data}"])
    assert planned.data.row_length == 2048


def test_a_draft_is_planned_for_decoding_whatever_its_data(run):
    code, output = run(infer.plan.main, "draft=qwen3-8b-eagle3", "target.path=unread", "machine=trn2.3xlarge")
    assert code == 0
    assert "eagle3 on trn2.3xlarge" in output


@pytest.mark.parametrize("mixture", ["mixture=one mixture.sources.rows.path=x", "mixture=chat"])
def test_prepare_takes_the_path_of_a_target_alone(mixture):
    prepared = compose("prepare", PrepareConf, [*mixture.split(), "target.path=/models/mine"])
    assert prepared.target is not None
    assert prepared.target.location == prepared.target.name == "/models/mine"
    assert not compose("prepare", PrepareConf, mixture.split()).has_target

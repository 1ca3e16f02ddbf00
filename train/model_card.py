"""The model card of a trained draft: README.md of its checkpoint, with Hugging Face's metadata."""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from data.config import DataConf, DataSource
from data.sources.prepared_rows import read_prepared_metadata
from infer.measure.report_schema import EvalReport
from infer.report.number_format import render_markdown_table
from infer.report.prose import build_headline, describe_verdicts
from infer.report.tables import overview_table
from models import checkpoint_files
from models.files import write_text_atomically
from train.config.optim import OptimConf
from train.config.run import TrainConf

TEMPLATE = Path(__file__).with_suffix(".md.j2")
CARD_FILE = "README.md"  # the name under which the hub shows a card
NOT_RECORDED = "not recorded"


def write_model_card(conf: TrainConf, report: EvalReport, run_folder: Path) -> None:
    """Write the card of the run's checkpoint from its configuration, metrics and report."""
    checkpoint = run_folder / "checkpoint"
    metadata = checkpoint_files.read_metadata(checkpoint)
    adapted = report.drafts[0].target is not None
    card = ModelCard.from_template(
        build_metadata(conf),
        template_path=str(TEMPLATE),
        title=f"{conf.draft.method} draft for {conf.target.name}",
        target=conf.target.name,
        target_hash=metadata.get(checkpoint_files.TARGET_HASH_KEY, NOT_RECORDED),
        served_target="THIS_FOLDER/target-*" if adapted else conf.target.name,
        verdict=" ".join(describe_verdicts(report)),
        limits=conf.draft.describe_engine_limits(),
        vllm_method=conf.draft.vllm_method,
        depth=min(report.tree.depth, conf.draft.max_proposal_depth),
        table=render_markdown_table(overview_table(report)),
        headline=build_headline(report),
        facts=list_training_facts(conf, run_folder),
    )
    write_text_atomically(checkpoint / CARD_FILE, f"{card.content.rstrip()}\n")


def build_metadata(conf: TrainConf) -> ModelCardData:
    """Return the metadata by which the hub lists the draft."""
    is_hub_data = conf.data.source is DataSource.dataset and not Path(conf.data.path or "").exists()
    return ModelCardData(
        base_model=conf.target.name, pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft", conf.draft.method],
        datasets=[conf.data.path] if is_hub_data and conf.data.path else None,
    )  # fmt: skip


def list_training_facts(conf: TrainConf, run_folder: Path) -> dict[str, str]:
    """Return what the draft was trained on and how, by name."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    last = next(m for m in map(json.loads, reversed(lines)) if "train/tokens" in m)
    return {
        "method": f"{conf.draft.method}, proposals of up to {conf.draft.max_proposal_depth} tokens",
        "data": conf.data.path or "the embedded demo",
        "license of the data": describe_licenses(conf.data),
        "tokens": f"{last['train/tokens']:,.0f}, of which {last['train/answer_tokens']:,.0f} of "
        f"answers; {last['train/epochs']:.2f} epochs in {last['step']:,} steps",
        "recipe": describe_recipe(conf.optim),
        "loss": conf.loss.name.value,
        "seed": str(conf.seed),
        "software": f"torch {version('torch')}, transformers {version('transformers')}",
    }


def describe_recipe(optim: OptimConf) -> str:
    """Return the optimizer, the rate and the size of a step in a line."""
    return (
        f"{optim.name.value}, rate {optim.lr:g}, {optim.schedule.value}, warm-up "
        f"{optim.warmup_ratio:.1%}, gradient norm at most {optim.max_grad_norm:g}, "
        f"{optim.rows_per_step} rows per step"
    )


def describe_licenses(data: DataConf) -> str:
    """Return the licenses that data.prepare recorded, with their rows, or that none are known."""
    if data.source is not DataSource.prepared or data.path is None:
        return NOT_RECORDED
    counts: Counter[str] = Counter()
    for file in sorted(Path(data.path).glob("train-*.parquet")):
        for licenses in read_prepared_metadata(file)["licenses"].values():
            counts.update(licenses)
    named = {name or NOT_RECORDED: count for name, count in counts.items()}
    return ", ".join(f"{name} ({count:,} rows)" for name, count in named.items()) or NOT_RECORDED

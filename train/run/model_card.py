"""The model card of a trained draft: README.md of its checkpoint, with Hugging Face's metadata."""

import json
import shlex
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from data.config import DataConf, DataSource
from data.features.manifest import read_manifest
from data.sources.licenses import NOT_RECORDED, describe_licenses
from infer.report.number_format import format_estimate, is_compared
from infer.report.prose import build_headline, describe_verdicts
from infer.report.tables import overview_table
from infer.report.views import get_draft_modes
from infer.results.schema import DraftInfo, EvalReport, LosslessVerdict, Mode, ModeFigures
from models.checkpoints import checkpoint_files
from models.checkpoints.saved_states import FIRST_STAGE_FOLDER, find_newest_state, read_progress_file
from models.drafts.options import CausalLMConf, InitFrom
from models.io.files import write_text_atomically
from models.io.pages import render_markdown_table
from models.targets.config import TargetConf
from train.config.optim import OptimConf, OptimName
from train.config.run import TrainConf
from train.run.folder import CARD_FILE

TEMPLATE = Path(__file__).with_suffix(".md.j2")
NO_ENGINE = "No serving engine is known to load this method's layout; the runtime that trained it does."


def write_model_card(conf: TrainConf, report: EvalReport, run_folder: Path, *, target_vocab: int) -> None:
    """Write the card of the run's checkpoint from its configuration, metrics and report."""
    checkpoint, draft = run_folder / "checkpoint", report.drafts[0]
    metadata = checkpoint_files.read_metadata(checkpoint)
    adapted = next((path.name for path in checkpoint.glob("target-*")), None)
    modes = get_draft_modes(report, draft)
    card = ModelCard.from_template(
        build_metadata(conf),
        template_path=str(TEMPLATE),
        title=f"{conf.draft.method} draft for {conf.target.path or conf.target.name}",
        target=describe_target(conf.target),
        target_hash=metadata.get(checkpoint_files.TARGET_HASH_KEY, NOT_RECORDED),
        served_target=f"THIS_FOLDER/{adapted}" if adapted else describe_served_target(conf.target),
        verdict=" ".join(describe_verdicts(report)),
        answers=describe_answers(draft, modes, adapted, report.setup.prompts.count),
        limits=conf.draft.describe_engine_limits() or describe_vocabulary(conf, checkpoint, target_vocab),
        vllm_method=conf.draft.vllm_method,
        depth=choose_served_chain(modes).depth,
        serving=describe_serving(draft, modes) if conf.draft.vllm_method else NO_ENGINE,
        table=overview_table(report).render_markdown(),
        headline=build_headline(report),
        facts=render_training_table(conf, run_folder),
        license=describe_license(conf),
    )
    write_text_atomically(checkpoint / CARD_FILE, f"{card.content.rstrip()}\n")


def build_metadata(conf: TrainConf) -> ModelCardData:
    """Return the metadata by which the hub lists the draft.

    A target or a data set that is not on the hub, such as a fine-tune, is named in the text alone:
    the hub refuses a card whose metadata names anything else.
    """
    is_hub_data = conf.data.source is DataSource.dataset and not Path(conf.data.path or "").exists()
    is_hub_target = not conf.target.is_demo and not Path(conf.target.location).exists()
    return ModelCardData(
        base_model=conf.target.location if is_hub_target else None,
        license="other",
        license_name="see-card",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft", conf.draft.method],
        datasets=[conf.data.path] if is_hub_data and conf.data.path else None,
    )


def describe_target(target: TargetConf) -> str:
    """Return the model that verifies, and for a local one what it is a copy or a fine-tune of."""
    if target.is_demo:
        return "the embedded demo target"
    of = "" if target.path is None or target.name == TargetConf.name else f" of {target.name}"
    revision = f" at revision `{target.revision}`" if target.revision else ""
    return f"`{target.location}`{revision}" + (f" (a local copy or fine-tune{of})" if of else "")


def describe_served_target(target: TargetConf) -> str:
    """Return the shell words by which vLLM serves the target."""
    revision = f" --revision {shlex.quote(target.revision)}" if target.revision else ""
    return f"{shlex.quote(target.location)}{revision}"


def describe_answers(draft: DraftInfo, modes: dict[str, Mode], adapted: str | None, prompts: int) -> str:
    """Return whose answers the draft's user gets, or nothing where the verdict already tells."""
    verdicts = [modes[name].verdict for name in ("chain", "tree", "tuned") if name in modes]
    if any(v.lossy or (is_compared(v) and v.lossless != LosslessVerdict.yes) for v in verdicts):
        return ""
    if adapted is not None and draft.target is not None:
        return (
            f"The target was trained with it: answers are those of `{adapted}` in this folder, which differ from the "
            f"original's on {draft.target.changed_answers} of {prompts} prompts."
        )
    return "Answers stay the target's own: what is rejected costs time, not quality."


def choose_served_chain(modes: dict[str, Mode]) -> ModeFigures:
    """Return the figures of the chain to serve with: the tuner's choice if it is a chain of the draft."""
    tuned = modes["tuned"].figures if "tuned" in modes else None
    is_chain = tuned is not None and tuned.draft_passes and tuned.nodes == tuned.depth
    return tuned if tuned and is_chain else modes["chain"].figures


def describe_serving(draft: DraftInfo, modes: dict[str, Mode]) -> str:
    """Return what a chain, which engines draft, gained, and what was faster without the draft."""
    chain, tuned = choose_served_chain(modes), modes.get("tuned")
    if chain.speedup is None:
        return "Engines draft a chain. None was measured: no answer took a round."
    is_slower = chain.speedup.mean < 1
    text = (
        f"Engines draft a chain. One of {chain.depth} tokens was {format_estimate(chain.speedup)} times as fast as the "
        f"target alone when it was measured, in the runtime that trained it{': there it does not pay' * is_slower}."
    )
    if tuned is not None and not tuned.figures.draft_passes:
        text += (
            f" The fastest decoding there does not use this draft: {draft.tuned_tree}. Measure "
            "both on your device before you deploy."
        )
    return text


def render_training_table(conf: TrainConf, run_folder: Path) -> str:
    """Return what the draft was trained on and how, as Markdown."""
    seen = read_steps(run_folder)
    state = find_newest_state(run_folder)
    best_step = (state and read_progress_file(state)["progress"]["best_step"]) or seen[-1]["step"]
    # The checkpoint is of that step, whatever the run learned later.
    last, first_stage = [line for line in seen if line["step"] <= best_step][-1], conf.first_stage()
    facts = {
        "method": f"{conf.draft.method}, proposals of up to {conf.draft.max_proposal_depth} tokens",
        "data": conf.data.path or "the embedded demo",
        "license of the data": describe_data_license(conf.data) or NOT_RECORDED,
        "tokens": f"{last['train/tokens']:,.0f}, of which {last['train/answer_tokens']:,.0f} of "
        f"answers; {last['train/epochs']:.2f} epochs in {last['step']:,} steps"
        + (f" of {seen[-1]['step']:,}, the best by its evaluations" if last is not seen[-1] else ""),
        **({"first stage": describe_first_stage(first_stage, run_folder)} if first_stage else {}),
        "recipe": describe_recipe(conf.optim),
        "loss": conf.loss.name.value,
        "seed": str(conf.seed),
        "software": f"torch {version('torch')}, transformers {version('transformers')}",
    }
    return render_markdown_table(["fact", "value"], [*facts.items()], label_columns=2)


def read_steps(run_folder: Path) -> list[dict[str, float]]:
    """Return the lines of metrics of training."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/tokens" in line]


def describe_first_stage(conf: TrainConf, run_folder: Path) -> str:
    """Return what the draft learned before it learned with its target, and how."""
    folder = run_folder / FIRST_STAGE_FOLDER
    if not folder.exists():  # removed, once the run went on without it
        return NOT_RECORDED
    last = read_steps(folder)[-1]
    return (
        f"{conf.draft.method} on the same data: {last['train/tokens']:,.0f} tokens in {last['step']:,} steps, "
        f"{describe_recipe(conf.optim)}"
    )


def describe_license(conf: TrainConf) -> str:
    """Return whose licenses bind the draft, by what it holds."""
    if isinstance(conf.draft, CausalLMConf) and conf.draft.pretrained is not None:
        return (
            f"It is `{conf.draft.location}`, trained further on the data above and on what the target makes of it: the "
            "licenses of all three bind it."
        )
    if isinstance(conf.draft, CausalLMConf) and conf.draft.init_from is InitFrom.random:
        return (
            "It holds no weight of the target, but learned from its outputs on the data above: both licenses bind it."
        )
    return "It holds parts of the target and learned from the data above: both licenses bind it."


def describe_vocabulary(conf: TrainConf, checkpoint: Path, target_vocab: int) -> str | None:
    """Return a warning for a draft model whose vocabulary is padded to another size than the target's, or None."""
    if not isinstance(conf.draft, CausalLMConf):
        return None
    config = checkpoint_files.read_config(checkpoint)
    rows = config.get("text_config", config)["vocab_size"]
    if rows == target_vocab:
        return None
    return (
        "Serving engines such as vLLM refuse a draft model whose vocabulary has another number of rows: it has "
        f"{rows:,}, the target {target_vocab:,}."
    )


def describe_recipe(optim: OptimConf) -> str:
    """Return the optimizer, the rate and the size of a step in a line."""
    rate = f"{optim.lr:g}"
    if optim.name is OptimName.muon:
        rate = f"{optim.muon_lr or 10 * optim.lr:g} of matrices and {rate} of the rest"
    return (
        f"{optim.name.value}, rate {rate}, {optim.schedule.value}, warm-up {optim.warmup_ratio:.1%}, gradient "
        f"norm at most {optim.max_grad_norm:g}, {optim.rows_per_step} rows per step"
    )


def describe_data_license(data: DataConf) -> str:
    """Return `data.license`, or what the store or the prepared folder tells; empty if it is not recorded."""
    if data.source is DataSource.captured and not data.license:
        return read_manifest(Path(str(data.path))).license
    return describe_licenses(data)

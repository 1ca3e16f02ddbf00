"""Choose the prompts that a run holds out of its data, and those that its report is about."""

import logging
from dataclasses import replace
from pathlib import Path

from data.config import DEMO, DataSource
from data.eval_prompts.held_out_files import HeldOutPrompts, format_data_name, rows_from_documents, rows_from_prepared
from data.eval_prompts.hold_out import HeldOutSplit, split_held_out
from data.packing.documents import Documents
from infer.config import EvaluationConf
from infer.measure.context_limits import max_answer_tokens, resolve_prompts
from models.io.errors import require
from models.targets.target import Target
from train.config.run import TrainConf

log = logging.getLogger(__name__)


def hold_out(conf: TrainConf, target: Target, documents: Documents) -> tuple[HeldOutSplit, HeldOutPrompts]:
    """Return the split of the documents, and the held-out prompts; raise UserError for too few."""
    if conf.data.source is DataSource.demo:
        split = split_held_out(documents, selection=conf.held_out.selection, final=0, row_length=conf.data.row_length)
        return split, HeldOutPrompts(selection=rows_from_documents(documents, split.selection, "the demo"))
    max_tokens = _max_prompt_tokens(conf, target)
    prepared = rows_from_prepared(conf.data, target.tokenizer, conf.held_out.report, max_tokens, target.vocab_size)
    split = split_held_out(
        documents,
        selection=conf.held_out.selection,
        final=conf.held_out.report - len(prepared),
        row_length=conf.data.row_length,
        max_prompt_tokens=max_tokens,
    )
    data_name = format_data_name(conf.data)
    require(
        bool(split.selection),
        f"data.row_length: must hold a prompt of at most {max_tokens} tokens and an answer of {data_name}, got "
        f"{conf.data.row_length} and none that fits; raise it or lower evaluation.max_new_tokens",
    )
    final = prepared + rows_from_documents(documents, split.final, data_name)
    _log_held_out(conf, split, len(final), max_tokens)
    return split, HeldOutPrompts(selection=rows_from_documents(documents, split.selection, data_name), final=final)


def resolve_evaluation(conf: TrainConf, folder: Path) -> EvaluationConf:
    """Return the evaluation at the end of a run in this folder, with its prompts resolved."""
    evaluation = conf.evaluation
    if evaluation.prompts is None and conf.data.source is DataSource.demo:
        evaluation = replace(evaluation, prompts=DEMO)
    return resolve_prompts(evaluation, [folder / "checkpoint"], conf.target)


def _max_prompt_tokens(conf: TrainConf, target: Target) -> int:
    """Return the most tokens that a prompt may have.

    A training row must hold it with a token of an answer, and the target's positions with the longest answer.
    """
    context = getattr(target.config, "max_position_embeddings", None)
    if context is None:
        return conf.data.row_length - 1
    return min(conf.data.row_length - 1, context - max_answer_tokens(conf.evaluation, context, demo=False))


def _log_held_out(conf: TrainConf, split: HeldOutSplit, num_final: int, max_tokens: int) -> None:
    """Log the prompts that are missing, and why; raise UserError if the report has none at all."""
    if split.num_too_long:
        log.info(
            "data: %d conversations cannot be held out: prompts of more than %d tokens, or no "
            "answer within data.row_length",
            split.num_too_long,
            max_tokens,
        )
    require(
        num_final > 0 or conf.evaluation.prompts is not None,
        f"held_out.report: must leave as many conversations to train on, got {split.num_groups} in "
        f"{format_data_name(conf.data)} with prompts of at most {max_tokens} tokens; give evaluation.prompts",
    )
    if num_final < conf.held_out.report:
        log.warning(
            "data: %d of %d prompts are held out for the report, as half of the %d conversations are left to train on",
            num_final,
            conf.held_out.report,
            split.num_groups,
        )

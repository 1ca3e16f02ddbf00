"""The prompts and lengths of an evaluation, and checks that they fit in a target's context."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data.config import DEMO
from data.eval_prompts.held_out_files import FINAL_FILE, find_held_out_file
from data.eval_prompts.prompts import load_eval_prompts
from infer.config import DEFAULT_NEW_TOKENS, DEMO_NEW_TOKENS, EvaluationConf
from models.io.errors import require
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer, read_context_length, read_vocab_size


def resolve_prompts(conf: EvaluationConf, directories: Sequence[Path], target: TargetConf) -> EvaluationConf:
    """Return `conf` with prompts and limit of new tokens filled in; raise UserError without prompts; load no model."""
    prompts = conf.prompts or find_held_out_file(directories, target, FINAL_FILE, key="evaluation.prompts")
    max_new_tokens = max_answer_tokens(conf, read_context_length(target), demo=prompts == DEMO)
    return replace(conf, prompts=prompts, max_new_tokens=max_new_tokens)


def max_answer_tokens(conf: EvaluationConf, context: int | None, *, demo: bool) -> int:
    """Return the configured limit of an answer, else the default or half of the target's `context` if that is less."""
    if conf.max_new_tokens is not None:
        return conf.max_new_tokens
    default = DEMO_NEW_TOKENS if demo else DEFAULT_NEW_TOKENS
    return default if context is None else min(default, context // 2)


def check_prompts(target: TargetConf, conf: EvaluationConf) -> int:
    """Check that the target can read every prompt, and that it fits with its answer.

    Return the tokens of the longest one; raise UserError otherwise. No model is loaded. The demo's
    own prompts, which `None` stands for, are short and not read: return 1. Later turns are checked
    by `check_context` as soon as they are known.
    """
    if conf.prompts is None:
        require(
            not conf.template,
            "evaluation.template: needs evaluation.prompts=FILE, which it renders, because held-out prompts keep the "
            f"arguments of their own rows, got {conf.template}; leave it out",
        )
        return 1
    context = read_context_length(target)
    prompts = load_eval_prompts(
        load_tokenizer(target),
        conf.prompts,
        limit=conf.prompts_per_category,
        vocab_size=read_vocab_size(target),
        template=conf.template,
    )
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    new_tokens = max_answer_tokens(conf, context, demo=conf.prompts == DEMO)
    require(
        context is None or len(longest.ids) + new_tokens <= context,
        f"evaluation.prompts: prompt and answer must fit in the {context} positions of {target.name}, got prompt "
        f"{longest.id} of {len(longest.ids)} tokens; shorten it or lower evaluation.max_new_tokens={new_tokens}",
    )
    return len(longest.ids)


def check_context(context: int | None, tokens: int, *, key: str = "evaluation.max_new_tokens") -> None:
    """Raise UserError, with the `key` to lower, for more tokens than the target's `context`, if that is known."""
    require(
        context is None or tokens <= context,
        f"{key}: prompt and answer must fit in the {context} positions of the target, got {tokens}; lower it or "
        "shorten the prompts",
    )

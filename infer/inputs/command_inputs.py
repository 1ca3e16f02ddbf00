"""Models and prompts of a command, loaded for the checkpoints that it names."""

from pathlib import Path

from infer.config import CheckpointConf, EvalConf, EvaluationConf
from infer.inputs.checkpoint_paths import resolve_target, run_names
from infer.inputs.memory_check import DecodingSize, check_memory
from infer.measure.context_limits import check_prompts, resolve_prompts
from infer.measure.eval_modes import DraftUnderTest
from models.checkpoints import checkpoint, checkpoint_files
from models.checkpoints.fingerprints import tokenizer_fingerprint
from models.drafts.registry import load_draft
from models.parallel.processes import connect_processes
from models.targets.config import TargetConf
from models.targets.loading import open_target
from models.targets.precision import build_device
from models.targets.pretrained import load_tokenizer
from models.targets.target import Target


def load_checkpoint_target(
    conf: TargetConf, command: CheckpointConf, directories: list[Path], size: DecodingSize
) -> Target:
    """Load the target of a command's checkpoints, or this process's part of it, to decode at most `size`.

    Raise UserError before that for drafts of another tokenizer, and for what the device cannot hold.
    """
    tokenizer_hash = tokenizer_fingerprint(load_tokenizer(conf))
    for directory in directories:
        metadata = checkpoint_files.read_metadata(directory)
        checkpoint.check_metadata(metadata, tokenizer_hash=tokenizer_hash)
    device, tensor = build_device(command.device, conf), command.parallel.tensor
    if tensor > 1:
        connect_processes(device.torch_device.type)  # each to its own device, whose memory is asked
    check_memory(conf, directories, size, device, command.device.memory_gib, tensor=tensor)
    return open_target(conf, device, tensor=tensor)


def load_draft_under_test(directory: Path, target: Target, *, name: str | None = None) -> DraftUnderTest:
    """Load the draft of a checkpoint, and rebuild it as it was before distillation."""
    draft = load_draft(directory, target)
    untrained = draft.rebuild_untrained(draft.get_verifying_target(target))
    return DraftUnderTest(
        name=name or run_names([directory])[0],
        draft=draft,
        directory=directory,
        adapted_target=draft.get_adapted_target(target),
        untrained=untrained if isinstance(untrained, str) else untrained.requires_grad_(False),
    )


def load_evaluation(conf: EvalConf, directories: list[Path]) -> tuple[Target, list[DraftUnderTest], EvaluationConf]:
    """Load the checkpoints' target and drafts; return them with the resolved configuration."""
    target_conf = resolve_target(conf.target, directories)
    evaluation = resolve_prompts(conf.evaluation, directories, target_conf)
    size = DecodingSize(
        batch=max([1, *evaluation.batch_sizes]),
        prompt_tokens=check_prompts(target_conf, evaluation),
        new_tokens=evaluation.new_tokens,
        set_batch=lambda batch: f"evaluation.batch_sizes={[batch] if batch > 1 else []}",
    )
    target = load_checkpoint_target(target_conf, conf, directories, size)
    drafts = [
        load_draft_under_test(directory, target, name=name)
        for name, directory in zip(run_names(directories), directories, strict=True)
    ]
    return target, drafts, evaluation

"""From options to drafts: the class of a method is imported when one of its drafts is needed."""

from pathlib import Path
from pkgutil import resolve_name

from models.checkpoints.checkpoint_files import read_config
from models.drafts.base import Draft
from models.drafts.options import METHODS, DraftConf
from models.io.errors import UserError
from models.losses.config import LossConf
from models.targets.target import Target


def find_draft_class(conf: DraftConf | type[DraftConf]) -> type[Draft]:
    """Import and return the class of the drafts that are built from these options."""
    return resolve_name(conf.draft_class)


def build_draft(conf: DraftConf, target: Target, *, loss: LossConf, seed: int, on_host: bool = False) -> Draft:
    """Build a new draft for this target, on its device or `on_host`; raise UserError if the two do not fit."""
    draft = find_draft_class(conf).build(conf, target, loss=loss, seed=seed)
    built = dict(draft.named_parameters(remove_duplicate=False))
    draft.to("cpu" if on_host else target.head.weight.device)
    for name, moved in draft.named_parameters(remove_duplicate=False):
        vars(moved).update(vars(built[name]))  # a move to PyTorch/XLA makes new ones, without a factor on their rate
    return draft


def load_draft(directory: Path, target: Target) -> Draft:
    """Load the draft of a checkpoint of any method, its weights frozen.

    Raise UserError if it does not fit the target, or has weights that are not finite.
    """
    draft = find_draft_class(find_options(directory)).load(directory, target)
    return draft.requires_grad_(False)


def find_options(directory: Path) -> type[DraftConf]:
    """Return the class of the options of a checkpoint's method; raise UserError for an unknown architecture."""
    config = read_config(directory)
    named = config.get("architectures")
    listed = config | {"architectures": named if isinstance(named, list) else []}
    if matching := [conf for conf in METHODS.values() if find_draft_class(conf).matches_config(listed)]:
        return matching[-1]  # the most specific
    known = ", ".join(dict.fromkeys(conf.architecture for conf in METHODS.values()))
    raise UserError(f"checkpoint: architecture must be one of {known}, got {named} in {directory}")

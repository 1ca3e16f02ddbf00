"""The command line: compose conf/<name>.yaml, validate it as a dataclass, call `main(conf)`.

This is the only module that imports Hydra. Every user error ends as one line,
`error: <key>: <rule>, got <value>; <remedy>`, and exit code 2.
"""

import argparse
import dataclasses
import functools
import hashlib
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import yaml
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from conf.drafts import list_options, load_drafts
from conf.error_lines import (
    complete_keys,
    reword_message,
    unknown_key_message,
    unknown_option_message,
    unreadable_message,
)
from conf.sequences import WRITERS, check_experiments, list_sequences, read_choices
from conf.typed_text import PATH_KEYS, quote_typed_text
from models.device.packages import guard_torch_autoload, limit_spinning
from models.drafts.options import METHODS
from models.io.errors import FOLDER_NAME, MAX_NAME_BYTES, UserError, check_values
from models.io.secrets import redact

CONF_DIR = str(Path(__file__).parent.resolve())
OTHER_PROCESSES_WAIT_S = 10.0  # until the first process has the same error, and the launcher has ended the others
USER_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError)

Conf = TypeVar("Conf")

# Before a command imports PyTorch.
guard_torch_autoload()
limit_spinning()

# Hydra copies this store, with all schemas, for each of the 120 lists that --help looks up, which
# takes seconds. A singleton needs no copy, and Hydra copies each schema that it loads from it.
ConfigStore.__deepcopy__ = lambda self, _: self  # pyright: ignore[reportAttributeAccessIssue]
# Python 3.14 tries to format each help text of a parser, and one of Hydra 1.3 is no string.
argparse.ArgumentParser._check_help = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
for _method, _schema in METHODS.items():
    ConfigStore.instance().store(
        group="draft/schema", name=_method, node=_schema, package="draft", provider="models.drafts.options"
    )


def entry_point(name: str, schema: type[Conf]) -> Callable[[Callable[[Conf], None]], Callable]:
    """Return a decorator that turns `main(conf: schema)` into the command of conf/<name>.yaml."""
    register_schema(name, schema)

    def decorate(main: Callable[[Conf], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command(cfg: DictConfig) -> None:
            try:  # inside the job too, because Hydra logs every exception that leaves it
                conf = validate_config(cfg)
                if hasattr(conf, "device"):
                    conf.device.export_variables()  # before `main` imports PyTorch
                main(conf)
            except USER_ERRORS as error:
                exit_with_error(error)

        @functools.wraps(main)
        def run() -> None:
            reject_windows(os.name)
            os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of print
            try:
                _run_command(command, name, schema)
            except (*USER_ERRORS, ValueError, AssertionError) as error:
                if not isinstance(error, USER_ERRORS) and not _is_raised_by_hydra(error):
                    raise
                exit_with_error(error)
            except KeyboardInterrupt:
                print_once("interrupted")
                sys.exit(130)

        return run

    return decorate


def _run_command(command: Callable[[DictConfig], None], name: str, schema: type) -> None:
    """Run the command as `hydra.main` does, but with text on the command line as it was typed."""
    setbase("1.3")
    parser = get_args_parser()
    args = parser.parse_args()
    register_options(name, schema)
    check_experiments(args.overrides, name)
    args.overrides = quote_typed_text(args.overrides, schema, is_sweep=args.multirun)
    _run_hydra(args=args, args_parser=parser, task_function=command, config_path=CONF_DIR, config_name=name)


def reject_windows(os_name: str) -> None:
    """Exit with code 2 on Windows, where files cannot be locked or flushed as runs need."""
    if os_name == "nt":
        exit_with_error(UserError("system: must be Linux or macOS, got Windows; use WSL 2 or a container"))


def register_schema(name: str, schema: type) -> None:
    """Register the schema as <name>_schema, which the defaults list of conf/<name>.yaml names."""
    ConfigStore.instance().store(name=f"{name}_schema", node=schema, provider=schema.__module__)


def register_options(command: str, schema: type) -> None:
    """Register what each draft brings to a command, and what each whole sequence chooses in it."""
    store = ConfigStore.instance()
    for group, name, node in list_options(schema):
        store.store(group=group, name=name, node=node, provider="conf.drafts")
    for name in list_sequences():
        node = {"defaults": [{f"override /{group}": option} for group, option in read_choices(name, command).items()]}
        store.store(group="experiment", name=name, package="_global_", node=node, provider="conf.sequences")


def compose(name: str, schema: type[Conf], overrides: list[str]) -> Conf:
    """Return the config that `entry_point` passes to main, for callers without a command line."""
    register_schema(name, schema)
    register_options(name, schema)
    check_experiments(overrides, name)
    with hydra.initialize_config_dir(config_dir=CONF_DIR, version_base="1.3"):
        typed = quote_typed_text(overrides, schema)
        cfg = hydra.compose(name, overrides=typed, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)  # the run_name resolver reads the chosen options
        with open_dict(cfg):
            del cfg["hydra"]
        return validate_config(cfg)


def validate_config(cfg: DictConfig) -> Any:
    """Return the composed config as its dataclass, checked; unknown keys and a bad run_name are errors too."""
    _expand_homes(cfg)
    try:
        conf: Any = OmegaConf.to_object(cfg)
    except UserError as error:
        raise UserError(complete_keys(str(error), OmegaConf.get_type(cfg))) from None
    if hasattr(conf, "run_name"):
        check_values(conf, run_name=FOLDER_NAME)
    for key, parent in _find_unknown_keys(conf):
        raise UserError(unknown_key_message(key, type(parent)))
    return conf


def _expand_homes(cfg: DictConfig) -> None:
    """Replace a leading ~ by the home folder in every path, from the command line or a file."""
    has_fields = dataclasses.is_dataclass(OmegaConf.get_type(cfg))
    for name in [name for name in cfg if not OmegaConf.is_missing(cfg, name)]:
        match value := cfg[name]:
            case DictConfig():
                _expand_homes(value)
            case str() if has_fields and name in PATH_KEYS:
                cfg[name] = os.path.expanduser(value)  # noqa: PTH111
            case ListConfig() if has_fields and name in PATH_KEYS:
                cfg[name] = [os.path.expanduser(str(path)) for path in value]  # noqa: PTH111


def _find_unknown_keys(conf: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key that `+key=value` added although no field has its name, and its dataclass."""
    fields = {f.name for f in dataclasses.fields(conf)}
    for name, value in vars(conf).items():
        if name not in fields and not name.startswith("_"):
            yield prefix + name, conf
        parts = {name: value}
        if isinstance(value, dict):
            parts = {f"{name}.{key}": part for key, part in value.items()}
        for path, part in parts.items():
            if dataclasses.is_dataclass(part):
                yield from _find_unknown_keys(part, f"{prefix}{path}.")


def config_to_yaml(conf: Any) -> str:
    """Return the config as YAML, as a run stores it, with `draft.method`, by which `read_config` finds its class."""
    plain: Any = OmegaConf.to_container(OmegaConf.structured(conf), enum_to_str=True)
    if hasattr(conf, "draft"):
        plain["draft"] = {"method": conf.draft.method, **plain["draft"]}
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def read_config(path: Path, schema: type[Conf]) -> Conf:
    """Return the config whose YAML `config_to_yaml` wrote."""
    saved = yaml.safe_load(path.read_text())
    cfg = OmegaConf.structured(schema)
    if "draft" in saved:
        cfg.draft = OmegaConf.structured(METHODS[saved["draft"].pop("method")])
    cfg.merge_with(saved)
    return validate_config(cfg)


def _run_name() -> str:
    """Return the whole sequence, draft or mixture; in a multirun, append the job's overrides."""
    hydra_conf = HydraConfig.get()
    choices, sequence = hydra_conf.runtime.choices, chosen_sequence()
    names = [sequence or choices.get("draft") or choices.get("mixture") or hydra_conf.job.name]
    if is_sweep():
        left_out = ("experiment=" if sequence else "draft=", "output_dir=")
        names += [o for o in hydra_conf.overrides.task if not o.startswith(left_out)]
    name = re.sub(r"[^\w.=,+-]", "_", "-".join(names).replace('"', ""))
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name.encode()[: MAX_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


def is_sweep() -> bool:
    """Return whether this command is one job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def chosen_sequence() -> str | None:
    """Return the experiment of this command if it is a whole sequence, else None."""
    if not HydraConfig.initialized():  # a caller without a command line
        return None
    name = HydraConfig.get().runtime.choices.get("experiment")
    return name if name in list_sequences() else None


def command_that_writes(path: Path) -> str | None:
    """Return the command of the chosen sequence and target that writes `path`, or None."""
    modules = {_of_sequence(output): module for output, module in WRITERS.items()}
    if (module := modules.get(str(path))) is None:
        return None
    target = [typed for typed in HydraConfig.get().overrides.task if typed.startswith("target")]
    return shlex.join(["python", "-m", module, f"experiment={chosen_sequence()}", *target])


def _of_sequence(path: str) -> str | None:
    """Return the path with the name of the chosen sequence for NAME, or None without any."""
    name = chosen_sequence()
    return name and path.replace("NAME", name)


def _groups_of_command() -> str:
    """Return the groups that this command takes with their options, a line each; Hydra's help lists all there are."""
    loader = GlobalHydra.instance().config_loader()
    groups = sorted(group for group in HydraConfig.get().runtime.choices if "/" not in group)
    return "\n".join(f"{group}: {', '.join(loader.get_group_options(group, ObjectType.CONFIG))}" for group in groups)


OmegaConf.register_new_resolver("groups_of_command", _groups_of_command, replace=True)
OmegaConf.register_new_resolver("run_name", _run_name, replace=True)
OmegaConf.register_new_resolver("of_sequence", _of_sequence, replace=True)
OmegaConf.register_new_resolver("expand_home", os.path.expanduser, replace=True)


def exit_with_error(error: Exception) -> NoReturn:
    """Print the error in one line and exit with code 2."""
    print_once(f"error: {redact(error_to_line(error))}")
    sys.exit(2)


def print_once(line: str) -> None:
    """Print a line that all processes of a node may have, on the error stream.

    The first one prints at once, and its launcher ends the others before they do. One that is alone with its error
    prints it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHER_PROCESSES_WAIT_S)
    print(line, file=sys.stderr)  # noqa: T201


def error_to_line(error: BaseException) -> str:
    """Format any error of this project, of Hydra or of OmegaConf as one line."""
    cause = error
    while type(cause) is ConfigCompositionException:
        cause = cause.__cause__ or cause.__context__ or Exception(str(cause))
    match cause:
        case MissingConfigException(missing_cfg_file=str(path), options=[*options]):
            group, _, name = path.partition("/")
            return unknown_option_message(group, name, options)
        case OverrideParseException(override=str(override)):
            return unreadable_message(*override.partition("="))
        case ConfigAttributeError() | ConfigKeyError():
            return unknown_key_message(str(cause.full_key), cause.object_type) + _config_file_note(error)
        case MissingMandatoryValue():
            key = cause.full_key or str(cause).splitlines()[0].rpartition(": ")[2]
            return f"{key}: must be set, got nothing; add {key}=VALUE"
        case ValidationError():
            return f"{cause.full_key}: {reword_message(str(cause.msg))}{_config_file_note(error)}"
    return reword_message(str(cause)) + _config_file_note(error)


def _config_file_note(error: BaseException) -> str:
    """Return a note that names the YAML file of the error, or "" if Hydra does not name it."""
    match = re.match(r"In '([^']+)'", str(error))
    if match is None:
        return ""
    group, _, name = match[1].rpartition("/")
    if group == "draft" and name in load_drafts():
        return f" (in conf/drafts.yaml, {name})"
    if group == "recipe":
        return f" (in conf/recipe/{name}.yaml, which is for another method; leave recipe={name} out)"
    is_ours = (Path(__file__).parent / f"{match[1]}.yaml").exists()
    return f" (in {'conf/' if is_ours else ''}{match[1]}.yaml)"


def _is_raised_by_hydra(error: BaseException) -> bool:
    """Return whether the error was raised in the code of Hydra or OmegaConf.

    Its type does not tell: for some mistakes, such as `target=null`, they raise a plain ValueError or AssertionError.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals["__name__"].startswith(("hydra.", "omegaconf."))

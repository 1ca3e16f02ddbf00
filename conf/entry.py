"""The command line: compose conf/<name>.yaml, validate it as a dataclass, call `main(conf)`.

The only module that knows Hydra. Whatever a user gets wrong ends as one line,
`error: <key>: <rule>, got <value>; <remedy>`, and exit code 2.
"""

import dataclasses
import difflib
import enum
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from models.drafts import METHODS
from models.drafts.base import DraftConf
from models.errors import UserError
from models.secrets import redact

CONF_DIR = str(Path(__file__).parent.resolve())
USER_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError)

SENTENCES = {
    r"Value ('.*') of type '\w+' could not be converted to Float": r"must be a number, got \1",
    r"Value ('.*') of type '\w+' could not be converted to Integer": r"must be an integer, got \1",
    r"Value ('.*') is not a valid bool": r"must be true or false, got \1",
    r"Invalid value ('.*'), expected one of \[(.*)\]": r"must be one of \2, got \1",
    r"field '.*' is not Optional": "must be set, got null",
    r"Invalid value assigned: (\w+) is not a ListConfig": r"must be a list, got one \1",
    r"Invalid type assigned: \w+ is not a subclass of \w+\. value: ([^\n]*)":
        r"must be keys with values, got \1",
    r"Cannot assign (\w+) to Dict": r"must be keys with values, got one \1",
    r"Cannot merge DictConfig with ListConfig":
        "config: keys must stand where a list does; write NAME: VALUE in place of - VALUE",
    r"Config group override must be a string or a list\. Got (\w+)":
        r"command line: a group takes the name of an option, got a value of type \1; see --help",
    r"Unexpected type for root: NoneType":
        "command line: a key of a group needs an option of it, got none; "
        "choose one before, as in target=qwen3-8b target.path=DIR",
    r"Ambiguous value for argument '([^=]+)=([^']*)'":
        r"\1: must be one value, got '\2'; for a run of each add -m, for a list write \1=[\2]",
}  # fmt: skip

Conf = TypeVar("Conf")

for _method, _schema in METHODS.items():
    ConfigStore.instance().store(
        group="draft/schema", name=_method, node=_schema, package="draft", provider="models.drafts"
    )


def entry_point(name: str, schema: type[Conf]) -> Callable[[Callable[[Conf], None]], Callable]:
    """Turn `main(conf: schema)` into a command line composed from conf/<name>.yaml."""
    register(name, schema)

    def decorate(main: Callable[[Conf], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=CONF_DIR, config_name=name)
        @functools.wraps(main)
        def command(cfg: DictConfig) -> None:
            try:  # here as well, because Hydra announces every exception that leaves a job
                main(validated(cfg))
            except USER_ERRORS as error:
                refuse(error)

        @functools.wraps(main)
        def run() -> None:
            refuse_windows(os.name)
            os.environ["HYDRA_FULL_ERROR"] = (
                "1"  # makes Hydra raise instead of printing its own text
            )
            try:
                command()
            except (*USER_ERRORS, ValueError, AssertionError) as error:
                if not isinstance(error, USER_ERRORS) and not _raised_by_hydra(error):
                    raise
                refuse(error)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)  # noqa: T201
                sys.exit(130)

        return run

    return decorate


def refuse_windows(system: str) -> None:
    """End a command where files cannot be locked or flushed as runs need it. Takes `os.name`."""
    if system == "nt":
        refuse(UserError("system: must be Linux or macOS, got Windows; use WSL 2 or a container"))


def register(name: str, schema: type) -> None:
    """Give conf/<name>.yaml its types: its defaults list starts with <name>_schema."""
    ConfigStore.instance().store(name=f"{name}_schema", node=schema, provider=schema.__module__)


def compose(name: str, schema: type[Conf], overrides: list[str]) -> Conf:
    """What `entry_point` passes to main, for callers that are not a command line."""
    register(name, schema)
    with hydra.initialize_config_dir(config_dir=CONF_DIR, version_base="1.3"):
        cfg = hydra.compose(name, overrides=overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)  # run names read the chosen options
        with open_dict(cfg):
            del cfg["hydra"]
        return validated(cfg)


def validated(cfg: DictConfig) -> Any:
    """The dataclass that the composed config describes; its `__post_init__` checks run."""
    conf = OmegaConf.to_object(cfg)
    for key, owner in _added(conf):
        raise UserError(_unknown(key, type(owner)))
    return conf


def _added(conf: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys that a `+key=value` brought in and no field knows, with the dataclass they landed in."""
    fields = {f.name for f in dataclasses.fields(conf)}
    for name, value in vars(conf).items():
        if name not in fields and not name.startswith("_"):
            yield prefix + name, conf
        if dataclasses.is_dataclass(value):
            yield from _added(value, f"{prefix}{name}.")


def config_yaml(conf: Any) -> str:
    """The config as a run keeps it, with `draft.method`, so that `read_config` finds its class."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(conf)))


def read_config(path: Path, schema: type[Conf]) -> Conf:
    """Read back what `config_yaml` wrote."""
    saved = yaml.safe_load(path.read_text())
    cfg = OmegaConf.structured(schema)
    if "draft" in saved:
        cfg.draft = OmegaConf.structured(METHODS[saved["draft"].pop("method")])
    cfg.merge_with(saved)
    return validated(cfg)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        method = {"method": value.method} if isinstance(value, DraftConf) else {}
        return method | {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def _run_name() -> str:
    """The chosen draft or mixture; in a multirun with what the job overrides: a folder for each."""
    hydra_conf = HydraConfig.get()
    choices = hydra_conf.runtime.choices
    names = [choices.get("draft") or choices.get("mixture") or hydra_conf.job.name]
    if hydra_conf.mode == RunMode.MULTIRUN:
        names += [
            o for o in hydra_conf.overrides.task if not o.startswith(("draft=", "output_dir="))
        ]
    return re.sub(r"[^\w.=,+-]", "_", "-".join(names))


def typed() -> list[str]:
    """List the overrides that the command line gave."""
    return list(HydraConfig.get().overrides.task)


def _is_typed(group: str) -> bool:
    """Return whether the command line names an option of the group."""
    return any(override.startswith(f"{group}=") for override in typed())


OmegaConf.register_new_resolver("run_name", _run_name, replace=True)
OmegaConf.register_new_resolver("typed", _is_typed, replace=True)


def refuse(error: Exception) -> NoReturn:
    """Say in one line what the user got wrong, and exit with code 2."""
    print(f"error: {redact(one_line(error))}", file=sys.stderr)  # noqa: T201  # a command's last word
    sys.exit(2)


def one_line(error: BaseException) -> str:
    """`<key>: <rule>, got <value>; <remedy>` for any error of ours, of Hydra or of OmegaConf."""
    cause = error
    while type(cause) is ConfigCompositionException:
        cause = cause.__cause__ or cause.__context__ or Exception(str(cause))
    match cause:
        case MissingConfigException(missing_cfg_file=str(path), options=[*options]):
            group, _, name = path.partition("/")
            return f"{group}: no such option, got '{name}'; choose one of {', '.join(options)}"
        case OverrideParseException():
            return f"command line: must be KEY=VALUE, got '{cause.override}'; see --help"
        case ConfigAttributeError() | ConfigKeyError():
            return _unknown(str(cause.full_key), cause.object_type) + _file(error)
        case MissingMandatoryValue():
            return _missing(cause)
        case ValidationError():
            return f"{cause.full_key}: {_reworded(str(cause.msg))}{_file(error)}"
    return _reworded(str(cause)) + _file(error)


def _unknown(key: str, schema: type | None) -> str:
    if not dataclasses.is_dataclass(schema):  # a free dict, such as the chat template's arguments
        return f"{key}: no such key; to add it write +{key}=VALUE"
    parent, _, name = key.rpartition(".")
    keys = dict(_keys(schema))
    here = [path for path in keys if "." not in path]
    near = [path for path, last in keys.items() if last == name]
    near += difflib.get_close_matches(name, here, n=1)
    path = f"{parent}." if parent else ""
    remedy = (
        f"did you mean {path}{near[0]}?" if near else f"choose one of {', '.join(sorted(here))}"
    )
    return f"{key}: no such key; {remedy}"


def _keys(schema: Any) -> Iterator[tuple[str, str]]:
    """Every key below a dataclass: its path and the last part of it."""
    for field in dataclasses.fields(schema):
        yield field.name, field.name
        if dataclasses.is_dataclass(field.type):
            yield from ((f"{field.name}.{path}", last) for path, last in _keys(field.type))


def _missing(error: MissingMandatoryValue) -> str:
    key = error.full_key or str(error).splitlines()[0].rpartition(": ")[2]
    return f"{key}: must be set, got nothing; add {key}=VALUE"


def _file(error: BaseException) -> str:
    """Which YAML file the error is in, where Hydra says so."""
    found = re.match(r"In '([^']+)'", str(error))
    return f" (in conf/{found[1]}.yaml)" if found else ""


def _reworded(text: str) -> str:
    """Hydra's and OmegaConf's sentences in our form; those not listed are only joined to a line."""
    for pattern, form in SENTENCES.items():
        if found := re.match(pattern, text, re.DOTALL):
            return found.expand(form)
    return re.sub(r"\s*\n\s*", "; ", text.strip())


def _raised_by_hydra(error: BaseException) -> bool:
    """Some of its complaints are plain errors, e.g. of `target=null`, or of a key below null."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals["__name__"].startswith(("hydra.", "omegaconf."))

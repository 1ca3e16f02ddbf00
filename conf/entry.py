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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from models.drafts import METHODS
from models.errors import UserError

CONF_DIR = str(Path(__file__).parent.resolve())
USER_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError)

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
            os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing its own text
            try:
                command()
            except USER_ERRORS as error:
                refuse(error)

        return run

    return decorate


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
    return OmegaConf.to_object(cfg)


def config_yaml(conf: Any) -> str:
    """The config as a run keeps it. `draft.method` is added, so that `read_config` finds its class."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(conf)))


def read_config(path: Path, schema: type[Conf]) -> Conf:
    """Read back what `config_yaml` wrote."""
    saved = OmegaConf.load(path)
    cfg = OmegaConf.structured(schema)
    if "draft" in saved:
        cfg.draft = OmegaConf.structured(METHODS[saved.draft.pop("method")])
    return validated(OmegaConf.merge(cfg, saved))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        method = {"method": value.method} if hasattr(value, "method") else {}
        return method | {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def _run_name() -> str:
    """The chosen draft; in a multirun also what this job overrides, so that no two share a folder."""
    hydra_conf = HydraConfig.get()
    names = [hydra_conf.runtime.choices.get("draft") or "run"]
    if hydra_conf.mode == RunMode.MULTIRUN:
        names += [o for o in hydra_conf.overrides.task if not o.startswith(("draft=", "output_dir="))]
    return re.sub(r"[^\w.=,+-]", "_", "-".join(names))


OmegaConf.register_new_resolver("run_name", _run_name, replace=True)


def refuse(error: Exception) -> NoReturn:
    """Say in one line what the user got wrong, and exit with code 2."""
    print(f"error: {one_line(error)}", file=sys.stderr)  # noqa: T201  # a command's last word
    sys.exit(2)


def one_line(error: BaseException) -> str:
    """`<key>: <rule>, got <value>; <remedy>` for any error of ours, of Hydra or of OmegaConf."""
    cause = error
    while not isinstance(cause, OmegaConfBaseException) and cause.__cause__ is not None:
        cause = cause.__cause__
    match cause:
        case MissingConfigException(missing_cfg_file=str(path), options=[*options]):
            group, _, name = path.partition("/")
            return f"{group}: no such option, got '{name}'; choose one of {', '.join(options)}"
        case OverrideParseException():
            return f"command line: must be KEY=VALUE, got '{cause.override}'; see --help"
        case MissingMandatoryValue():
            return f"{cause.full_key}: must be set, got nothing; add {cause.full_key}=VALUE"
        case ConfigAttributeError() | ConfigKeyError():
            return f"{cause.full_key}: no such key{_file(error)}; {_nearest(cause)}"
        case ValidationError():
            return f"{cause.full_key}: {_rule(cause)}{_file(error)}"
    return re.sub(r"\s*\n\s*", "; ", str(cause).strip())


def _file(error: BaseException) -> str:
    """Which YAML file the error is in, where Hydra says so."""
    found = re.match(r"In '([^']+)'", str(error))
    return f" (in conf/{found[1]}.yaml)" if found else ""


def _nearest(error: OmegaConfBaseException) -> str:
    keys = [f.name for f in dataclasses.fields(error.object_type)]
    near = difflib.get_close_matches(str(error.key), keys, n=1)
    return f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(sorted(keys))}"


def _rule(error: OmegaConfBaseException) -> str:
    return str(error.msg).splitlines()[0]

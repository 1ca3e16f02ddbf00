"""Secrets in settings and messages: found by the look of their name or value, and never shown.

Whatever a config holds is kept in config.yaml, so a secret has to stay out of it.
"""

import re
from collections.abc import Iterator
from typing import Any

NAME = re.compile(
    r"(api|access|auth|private|secret)[-_.]?(key|token)|(^|[-_.])(key|token|auth|bearer)$"
    r"|secret|passw(or)?d|passphrase|credential|authorization|cookie",
    re.IGNORECASE,
)
VALUE = re.compile(r"(Bearer|Basic) \S|(sk|pk|hf|ghp|glpat|xox[abp])[-_]\w{8}")  # of known services
USERINFO = re.compile(r"(?<=//)\S+@(?=[\w\[])|[^\s/:'\"]+:(?!//)[^\s'\"]*@(?=[\w\[])")


def find_secrets(settings: Any, path: str) -> Iterator[str]:
    """Yield the dotted keys below `path` whose name or value looks like a secret."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            key = f"{path}.{name}"
            if NAME.search(str(name)) and value is not None:
                yield key
            else:
                yield from find_secrets(value, key)
    elif isinstance(settings, list):
        for number, value in enumerate(settings):
            yield from find_secrets(value, f"{path}[{number}]")
    elif isinstance(settings, str) and (VALUE.match(settings) or redact(settings) != settings):
        yield path


def redact(text: str) -> str:
    """Blank out the credentials of addresses.

    >>> redact("got http://me:pass@host/v1, got me:pass@host")
    'got http://***@host/v1, got ***@host'
    """
    return USERINFO.sub("***@", text)

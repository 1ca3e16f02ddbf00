"""Secrets in settings and messages: recognized by their name or value, and never shown.

A run's whole config is written to config.yaml, so it must not hold a secret.
"""

import re
from collections.abc import Iterator
from typing import Any

SECRET_NAME = re.compile(
    r"(api|access|auth|private|secret)[-_.]?(key|token)|(^|[-_.])(key|token|auth|bearer)$"
    r"|secret|passw(or)?d|passphrase|credential|authorization|cookie",
    re.IGNORECASE,
)
# Values that begin as the keys of known services do.
SECRET_VALUE = re.compile(r"(Bearer|Basic) \S|(sk|pk|hf|ghp|glpat|xox[abp])[-_]\w{8}")
URL_CREDENTIALS = re.compile(r"(?<=//)\S+@(?=[\w\[])|[^\s/:'\"]+:(?!//)[^\s'\"]*@(?=[\w\[])")


def find_secrets(settings: Any, path: str) -> Iterator[str]:
    """Yield the dotted keys below `path` whose name or value looks like a secret."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            key = f"{path}.{name}"
            if SECRET_NAME.search(str(name)) and value is not None:
                yield key
            else:
                yield from find_secrets(value, key)
    elif isinstance(settings, list):
        for index, value in enumerate(settings):
            yield from find_secrets(value, f"{path}[{index}]")
    elif isinstance(settings, str) and (SECRET_VALUE.match(settings) or redact(settings) != settings):
        yield path


def redact(text: str) -> str:
    """Return `text` with the credentials in URLs and addresses replaced by ***.

    >>> redact("got http://me:pass@host/v1, got me:pass@host")
    'got http://***@host/v1, got ***@host'
    """
    return URL_CREDENTIALS.sub("***@", text)

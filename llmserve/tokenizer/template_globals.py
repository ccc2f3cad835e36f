"""The functions that templates may call, with the names that transformers gives them."""

from __future__ import annotations

import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.utils import Namespace

from llmserve.tokenizer.template_budget import TemplateLimitError
from llmserve.tokenizer.template_checks import OperationChecks

_MAX_DATE_FORMAT = 1000  # characters


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused: its call of raise_exception."""


def raise_exception(message: Any) -> NoReturn:
    raise TemplateRaisedError(str(message))


def strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT:
        raise TemplateLimitError("it formats a date at too great a length")
    return datetime.datetime.now().strftime(format)


class TemplateNamespace(Namespace):
    """Jinja's namespace; as in transformers, its names do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` is possible
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its values may hold each other in any number


class DictMaker:
    """`dict(...)`. Entries are counted one by one: keys may have been made to collide."""

    def __init__(self, checks: OperationChecks) -> None:
        self._checks = checks

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if len(args) > 1:
            raise TypeError(f"dict takes at most 1 positional argument, not {len(args)}")
        made: dict[Any, Any] = {}
        for given in args:
            pairs = given.items() if isinstance(given, dict) else given
            for key, value in self._checks.counted(pairs):
                made[key] = value
        made.update(kwargs)
        return made

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(self._checks.counted(keys), value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace must not hold the name {name!r}, which begins with an underscore"
        )

"""Jinja for templates that came with a model file, which is to say from a stranger.

Jinja's sandbox keeps a template away from Python; it does not keep it from looping for ever or from doubling a string
forty times. So each rendering has a budget, and whatever can grow pays before it grows: an iteration, a macro call,
each value that is put out, joined or made a member of another, the arguments of calls. Work and memory are then bounded
by the budget, which grows with the request, and a real template uses a small part of it.

The compiled template is the ordinary one with the payments put in (`_PaymentsAdded`); what can make something large
out of something small in one go (a string times a number, a field width) is checked by its operands or left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["BudgetExceeded", "TemplateSandbox"]

_BASE_BUDGET = 8 << 20
_BUDGET_PER_CHARACTER = 64
_LIMIT_S = 10.0
_CALL_PRICE = 16  # an iteration, a call or a member takes the time of so many characters
_MAX_INTEGER_BITS = 4096
_MAX_INDENT = 64
_JINJAS_OWN = ("_loop_vars", "_block_vars")  # what it hands along with each call in a loop or block

# Each can make much out of nothing, and no chat template has a use for it.
_NO_FILTERS = ("batch", "center", "format", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_STRUCTURAL_FILTERS = frozenset(
    {"attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max"}
    | {"min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"}
)  # these look at a container's members, not into them
_NO_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"})


class BudgetExceeded(SecurityError):  # noqa: N818 - named after what happened
    """The template wants more work than an honest one would."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, which is that of transformers, with a budget.

    Args:
        clock: local time for `strftime_now`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._remaining: ContextVar[_Budget] = ContextVar("remaining")
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters["indent"] = _limited_indent(self.filters["indent"])
        self.filters["join"] = self._join
        self.filters["replace"] = lambda text, old, new, count=None: self._replace(str(text), old, new, count)
        self.filters = {name: self._paid_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["range"] = self._range
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    @contextmanager
    def budget(self, num_characters: int) -> Iterator[None]:
        """Allow what follows, in this thread or task, the work that a request of so many characters may cost."""
        token = self._remaining.set(_Budget(_BASE_BUDGET + _BUDGET_PER_CHARACTER * num_characters))
        try:
            yield
        finally:
            self._remaining.reset(token)

    def pay(self, amount: int) -> str:
        """Take from the budget; the empty string is for templates to put out.

        Raises:
            BudgetExceeded: nothing is left, or the time is up.
        """
        self._remaining.get().pay(amount)
        return ""

    def paid(self, value: Any) -> Any:
        """The value, paid for by all that is in it."""
        self.pay(_deep_size(value))
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _PaymentsAdded().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "*" and not numbers:
            count, value = (left, right) if isinstance(left, int) else (right, left)
            self.pay(_deep_size(value) * max(1, count) if isinstance(count, int) else 1)
        elif operator == "+" and not numbers:
            self.pay(_deep_size(left) + _deep_size(right))
        elif operator == "%" and not numbers:
            raise SecurityError("formatting by % is not available to chat templates")
        elif operator == "**" and isinstance(right, int) and abs(right) > _MAX_INTEGER_BITS:
            raise BudgetExceeded(f"it wants an exponent of {right}")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_INTEGER_BITS:
            raise BudgetExceeded(f"it wants a number of {result.bit_length()} bits")
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if owner is self:  # a payment that `_PaymentsAdded` put in; templates have no name for it
            return function(*args)
        self.pay(_CALL_PRICE)
        if isinstance(owner, str):
            self.pay(len(owner))
            match getattr(function, "__name__", ""), args:
                case "join", (parts,):
                    args = (self._parts(owner, parts),)
                case "replace", (str(old), str(new), *_):
                    self.pay(owner.count(old) * len(new))
        self.paid(args)
        self.paid({name: value for name, value in kwargs.items() if name not in _JINJAS_OWN})
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, int | float | bytes) or (isinstance(obj, str) and attr in _NO_METHODS):
            return False  # numbers and bytes have widths too, and nothing that a template needs
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # so that `is_safe_attribute` refuses it

    def _paid_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        size = _size if name in _STRUCTURAL_FILTERS else _deep_size

        @wraps(function)  # which keeps the marks by which Jinja knows that a filter takes its context
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.pay(_CALL_PRICE + sum(map(size, args)))
            return function(*args, **kwargs)

        return paid

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.pay(len(numbers))
        return numbers

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = (self.getitem(item, attribute) for item in value)
        return d.join(map(str, self._parts(d, value)))

    def _parts(self, separator: str, parts: Iterable[Any]) -> list[Any]:
        """What is to be joined, paid for."""
        paid = [self.paid(part) for part in parts]
        self.pay(len(separator) * len(paid))
        return paid

    def _replace(self, text: str, old: str, new: str, count: int | None = None) -> str:
        self.pay(text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)


class _Budget:
    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._deadline = time.thread_time() + _LIMIT_S

    def pay(self, amount: int) -> None:
        self._amount -= amount
        if self._amount < 0:
            raise BudgetExceeded("it wants more output or more iterations than a chat template needs")
        if time.thread_time() > self._deadline:
            raise BudgetExceeded(f"it computes for more than {_LIMIT_S:.0f} s")


class _PaymentsAdded(NodeTransformer):
    """Rewrites a parsed template so that it pays for what it does."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's protocol
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("pay", nodes.Const(_CALL_PRICE)), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("pay", nodes.Const(_CALL_PRICE)), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        node.nodes = [
            *([_call("pay", nodes.Const(literal))] if literal else []),
            *(child if isinstance(child, nodes.TemplateData) else _call("paid", child) for child in node.nodes),
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_call("paid", child) for child in node.nodes]
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("paid", node) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("paid", node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _call("paid", node) if node.items and node.ctx == "load" else node  # else it is what a `for` assigns to


def _call(method: str, argument: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None, lineno=argument.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model is trained on; for rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - the extension's protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have an attribute {name!r}")
        super().__setitem__(name, value)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | set | frozenset | range) else 1


def _deep_size(value: Any) -> int:
    """Characters and members in a value, counted as often as they would be put out."""
    if isinstance(value, str):
        return len(value)
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        total += len(item) if isinstance(item, str) else _CALL_PRICE
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
    return total


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > _MAX_INDENT:
        raise BudgetExceeded(f"it wants an indent of {indent}")
    # Unlike Jinja's own, this escapes nothing for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limited_indent(indent: Callable[..., str]) -> Callable[..., str]:
    @wraps(indent)
    def limited(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if (width if isinstance(width, int) else len(width)) > _MAX_INDENT:
            raise BudgetExceeded(f"it wants an indent of {width!r:.20}")
        return indent(text, width, first, blank)

    return limited

"""What of a request a chat template reads: for fields that have no effect to be named."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.meta
import jinja2.nodes

__all__ = ["TemplateReads"]


class TemplateReads:
    """Of a template, parsed.

    Attributes:
        variables: names that it reads and does not set.
    """

    def __init__(self, tree: jinja2.nodes.Template) -> None:
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        # message.name, message['name'], message.get('name'), messages | selectattr('name'), 'name' in message
        self._names = {"role", "content"}
        self._names |= {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
        self._names |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self._writes_whole_messages = _writes_whole(tree, _names_of_messages(tree))

    def unread_fields(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Fields of messages that hold something and are never read: each once, with the first message that has it."""
        if self._writes_whole_messages:
            return []
        found: dict[str, int] = {}
        for index, message in enumerate(messages):
            for name, value in message.items():
                if value not in (None, [], {}) and name not in self._names:
                    found.setdefault(name, index)
        return [(index, name) for name, index in found.items()]


def _names_of_messages(tree: jinja2.nodes.Template) -> set[str]:
    """Variables that are, or come from, messages: of loops over them, and those set from them."""
    names = {"messages"}
    for _ in range(2):  # a variable may come from one that comes from messages
        for loop in tree.find_all(jinja2.nodes.For):
            if names & {name.name for name in loop.iter.find_all(jinja2.nodes.Name)} | names & _name(loop.iter):
                names |= _name(loop.target) | {name.name for name in loop.target.find_all(jinja2.nodes.Name)}
        for assign in tree.find_all(jinja2.nodes.Assign):
            if names & ({name.name for name in assign.node.find_all(jinja2.nodes.Name)} | _name(assign.node)):
                names |= _name(assign.target)
    return names


def _name(node: jinja2.nodes.Node) -> set[str]:
    return {node.name} if isinstance(node, jinja2.nodes.Name) else set()


def _writes_whole(tree: jinja2.nodes.Template, messages: set[str]) -> bool:
    """Whether it may write fields without naming them: message | tojson, message.items(), {{ message }}."""
    uses = [*tree.find_all((jinja2.nodes.Filter, jinja2.nodes.Output, jinja2.nodes.Concat, jinja2.nodes.Add))]
    for use in uses:
        if isinstance(use, jinja2.nodes.Filter) and use.name in ("length", "count", "selectattr", "rejectattr", "map"):
            continue
        if any(isinstance(part, jinja2.nodes.Name) and part.name in messages for part in use.iter_child_nodes()):
            return True
    calls = (call.node for call in tree.find_all(jinja2.nodes.Call))
    return any(
        isinstance(call, jinja2.nodes.Getattr) and call.attr in ("items", "values") and _name(call.node) & messages
        for call in calls
    )

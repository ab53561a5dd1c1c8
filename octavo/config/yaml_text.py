"""YAML as people write it by hand: a key that stands twice in one mapping is a mistake, which PyYAML lets pass."""

from typing import Any

from octavo.errors import ConfigError

__all__ = ["load_yaml"]


def load_yaml(text: str) -> Any:
    """What the text says; None where it is empty.

    Raises:
        ConfigError: a key is there twice. It names the lines and quotes nothing: the text may hold secrets.
        yaml.YAMLError, ValueError, RecursionError: it is not YAML.
    """
    import yaml  # here: most command lines need none

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        seen: set[int] = set()  # an alias is the node that it names
        left = [] if root is None else [root]
        while left:
            node = left.pop()
            if id(node) in seen or isinstance(node, yaml.ScalarNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
                left += [value for _, value in node.value]
            else:
                left += node.value
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _check_keys(mapping: Any) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key.value, str) or key.tag.endswith(":merge"):
            continue
        line, name = key.start_mark.line + 1, (key.tag, key.value)
        if name in lines:
            raise ConfigError(f"line {line} says again what line {lines[name]} says; leave one of them out")
        lines[name] = line

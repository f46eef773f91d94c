"""Load YAML of strangers: plain values only, no aliases, each key once; and dump the same."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import MappingNode, Node

_DATE = "tag:yaml.org,2002:timestamp"


class PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases, merge keys, dates, sets and binary data."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node. Raise YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"alias *{event.anchor} in line {event.start_mark.line + 1}; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping of texts to values. Raise YAMLError for a key that stands twice or is no text."""
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key that is no text")
            if key in keys:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            keys.add(key)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """SafeDumper without aliases, which the loader refuses: a value that stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True."""
        return True


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_DATE, "tag:yaml.org,2002:merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rsplit(":", 1)[-1] in ("null", "bool", "int", "float", "str", "seq", "map")
}

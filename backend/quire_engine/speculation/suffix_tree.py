# SPDX-License-Identifier: Apache-2.0
"""Suffix tree over windows of tokens. It counts which tokens followed a run of tokens, and how often. Torch-free.

For each position of a text, the window that starts there is added to the tree; it has at most `depth` tokens. The
labels on the path from the root to a node form a run of tokens that occurs in a window. A label can have many tokens,
so a window adds at most two nodes. Removing a window undoes its addition.

Source: Weiner 1973 for suffix trees; Oliaro et al. 2024 (SuffixDecoding) for counts over past outputs.
"""

from array import array

TOKEN_BYTES = array("I").itemsize
_NODE_BYTES = 180
"""Size of a node in bytes, without the tokens of its label. It includes the object, its entry in the parent and the
header of the label."""
_CHILDREN_BYTES = 240
"""Size in bytes of the table of children. Only a node that has children has this table."""


class _Node:
    __slots__ = ("children", "count", "label")

    def __init__(self, label: bytes, count: int) -> None:
        self.label = label
        """The tokens between the parent and this node, as native unsigned integers."""
        self.count = count
        """Number of windows that start with the run of tokens from the root to this node."""
        self.children: dict[bytes, _Node] | None = None
        """Maps the first token of a child's label to the child."""


class SuffixTree:
    """Counts how often runs of tokens occur in the windows that were added.

    Windows and runs are `bytes` objects that contain tokens as native unsigned integers.
    """

    def __init__(self) -> None:
        self._root = _Node(b"", 0)
        self._root.children = {}
        self.num_bytes = 0
        """Estimated memory of the nodes."""

    @property
    def num_windows(self) -> int:
        """Number of windows in the tree."""
        return self._root.count

    def add(self, window: bytes) -> None:
        """Add a window of at least one token."""
        node, start = self._root, 0
        node.count += 1
        while start < len(window):
            first = window[start : start + TOKEN_BYTES]
            child = node.children.get(first) if node.children is not None else None
            if child is None:
                self._attach(node, first, _Node(window[start:], 1))
                return
            if not window.startswith(child.label, start):
                child = self._split(node, first, _num_common_bytes(child.label, window, start))
            child.count += 1
            node, start = child, start + len(child.label)

    def remove(self, window: bytes) -> None:
        """Remove a window that was added."""
        node, start = self._root, 0
        node.count -= 1
        while start < len(window):
            first = window[start : start + TOKEN_BYTES]
            assert node.children is not None
            child = node.children[first]
            child.count -= 1
            if child.count == 0:
                self._detach(node, first)
                break
            node, start = child, start + len(child.label)
        self._join_only_child(node)

    def follow(self, context: bytes, max_match: int, max_tokens: int, min_probability: float) -> tuple[int, list[int]]:
        """Find the longest run at the end of `context` for which the tree has a continuation, and return its most
        frequent continuation.

        Args:
            context: tokens, each with TOKEN_BYTES bytes.
            max_match: maximum number of tokens of the run.
            max_tokens: maximum number of tokens of the continuation.
            min_probability: the continuation ends before the product of the relative counts of its tokens becomes less
                than `min_probability`.

        Returns:
            The number of tokens of the run (0 if there is none), and the continuation.
        """
        # If the tree has a continuation for a run, it also has one for each shorter run. So bisection finds the longest
        # run.
        shortest, longest, place = 0, min(max_match, len(context) // TOKEN_BYTES), None
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            found = self._find(context[len(context) - middle * TOKEN_BYTES :])
            if found is None:
                longest = middle - 1
            else:
                shortest, place = middle, found
        return shortest, [] if place is None else _most_frequent(*place, max_tokens, min_probability)

    def _find(self, run: bytes) -> tuple[_Node, int] | None:
        """Return the node in whose label a run ends, and how many bytes of this label belong to the run.

        Return None if the tree does not contain the run, or if no token follows the run.
        """
        node, start = self._root, 0
        while start < len(run):
            child = node.children.get(run[start : start + TOKEN_BYTES]) if node.children is not None else None
            if child is None:
                return None
            rest = len(run) - start
            if rest < len(child.label):
                return (child, rest) if child.label.startswith(run[start:]) else None
            if not run.startswith(child.label, start):
                return None
            node, start = child, start + len(child.label)
        return (node, len(node.label)) if node.children else None

    def _split(self, parent: _Node, first: bytes, num_bytes: int) -> _Node:
        """Insert a node above a child, and return the node. It takes over the first `num_bytes` of the child's
        label."""
        assert parent.children is not None
        child = parent.children[first]
        upper = _Node(child.label[:num_bytes], child.count)
        child.label = child.label[num_bytes:]
        self.num_bytes -= num_bytes
        self._attach(parent, first, upper)
        upper.children = {child.label[:TOKEN_BYTES]: child}
        self.num_bytes += _CHILDREN_BYTES
        return upper

    def _join_only_child(self, node: _Node) -> None:
        """Merge a node with its only child, if no window ends between them."""
        if node is self._root or node.children is None or len(node.children) != 1:
            return
        [child] = node.children.values()
        if child.count == node.count:
            node.label, node.children = node.label + child.label, child.children
            self.num_bytes -= _NODE_BYTES + _CHILDREN_BYTES

    def _attach(self, parent: _Node, first: bytes, child: _Node) -> None:
        if parent.children is None:
            parent.children = {}
            self.num_bytes += _CHILDREN_BYTES
        parent.children[first] = child
        self.num_bytes += _NODE_BYTES + len(child.label)

    def _detach(self, parent: _Node, first: bytes) -> None:
        """Drop a child that no window contains. The child does not have children, because the window that is being
        removed was the last one below it."""
        assert parent.children is not None
        child = parent.children.pop(first)
        assert child.children is None
        self.num_bytes -= _NODE_BYTES + len(child.label)
        if not parent.children and parent is not self._root:
            parent.children = None
            self.num_bytes -= _CHILDREN_BYTES


def _num_common_bytes(label: bytes, window: bytes, start: int) -> int:
    """Compare a label with the part of a window that begins at `start`. Return how many bytes at the beginning of the
    two are equal, counting only whole tokens."""
    num_bytes = TOKEN_BYTES
    while label[num_bytes : num_bytes + TOKEN_BYTES] == window[start + num_bytes : start + num_bytes + TOKEN_BYTES]:
        num_bytes += TOKEN_BYTES
    return num_bytes


def _most_frequent(node: _Node, start: int, max_tokens: int, min_probability: float) -> list[int]:
    """Return the most frequent continuation of a run. The run ends at byte `start` of the label of `node`."""
    path, probability, num_bytes = b"", 1.0, max_tokens * TOKEN_BYTES
    while True:
        path += node.label[start:]
        if len(path) >= num_bytes or not node.children:
            break
        child = max(node.children.values(), key=_count)
        probability *= child.count / node.count
        if probability < min_probability:
            break
        node, start = child, 0
    tokens = array("I")
    tokens.frombytes(path[:num_bytes])
    return tokens.tolist()


def _count(node: _Node) -> int:
    return node.count

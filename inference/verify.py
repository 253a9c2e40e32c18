"""Verification: walk down the draft tree along the target's own picks.

Greedy decoding and lossless sampling are one walk with another pick: the target picks its token at a node (argmax, or a
keyed draw from its own processed law), and if the tree holds that token below the node, the walk goes on there. This is
exact for any tree and any drafter and needs no draft probabilities. The pick where the tree ends is the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.sampling import Sampling
from ..core.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """nodes [B, A] long: accepted path, root first, zero-padded; lengths [B] long: its length; bonus [B] long."""

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The true tokens before each node, for processors that read them.

    tokens [B, M] long: committed tokens, the root last; lengths [B] long: how many of them each row has.
    """

    tokens: Tensor
    lengths: Tensor

    def upto(self, row: int, path: Tensor) -> Tensor:
        """Return row's committed tokens followed by the path's draft tokens [P], as [1, length + P] long."""
        return torch.cat([self.tokens[row, : int(self.lengths[row])], path])[None]


def verify_tree(tree: DraftTree, logits: Tensor, sampling: Sampling, positions: Tensor, prefixes: Prefixes) -> Verdict:
    """Find the longest path that the target would have said itself.

    tree: N nodes. logits [B, N, V]: the target's, row v is the law of v's children. sampling: how the target picks.
    positions [B] long: position of the root. prefixes: committed tokens, root included.

    Example: children of the root are tokens 5 and 8, and the target picks 8 at the root and 3 at that child, which is
    not in the tree: nodes = [0, 2], lengths = 2, bonus = 3.
    """
    batch, depth = tree.tokens.shape[0], tree.max_depth
    rows = torch.arange(batch, device=tree.tokens.device)
    node = torch.zeros_like(rows)
    nodes = torch.zeros(batch, depth + 1, dtype=torch.long, device=rows.device)
    lengths = torch.ones_like(rows)
    bonus = torch.zeros_like(rows)
    walking = torch.ones_like(rows, dtype=torch.bool)
    for level in range(depth + 1):

        def prefix(row: int, lengths: Tensor = lengths) -> Tensor:
            return prefixes.upto(row, tree.tokens[row, nodes[row, 1 : int(lengths[row])]])

        pick = sampling.pick(logits[rows, node], positions + level + 1, prefix)
        bonus = torch.where(walking, pick, bonus)
        if level == depth:
            break
        child = (tree.parents == node[:, None]) & (tree.tokens == pick[:, None]) & tree.valid
        walking = walking & child.any(1)
        node = torch.where(walking, child.int().argmax(1), node)
        nodes[:, level + 1] = torch.where(walking, node, 0)
        lengths = lengths + walking
        # on the CPU looking costs nothing; elsewhere it would be a sync, so the walk runs to the tree's depth
        if rows.device.type == "cpu" and not walking.any():
            break
    return Verdict(nodes, lengths, bonus)

"""From a drafter's candidates to a draft tree, for every method and every proposal."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..core.proposals import Candidates
from ..core.tree import DraftTree, DrawnFrom, TreeTopology, topology_builder
from .modules import DraftVocabulary


def static_tree(topology: TreeTopology, root: Tensor, found: Candidates, vocabulary: DraftVocabulary) -> DraftTree:
    """Fill a static topology with candidates that depend on the depth alone.

    root [B] long; found: [B, K, R], K >= the topology's depth, R >= its width. Where candidates were drawn, a node
    takes the draw of its place among its siblings, so that they stand in draw order whatever ranks the topology names.
    """
    builder = topology_builder(topology, root.device)
    if found.law is None or found.possible is None:
        return builder.build(root, vocabulary.to_target(found.index))
    tree = builder.build(root, vocabulary.to_target(found.index), by_place=True)
    depth = (tree.depth[:, 1:] - 1).clamp(min=0)
    rows = depth.new_tensor(range(len(root)))[:, None]
    valid = tree.valid.clone()
    valid[:, 1:] &= found.possible[rows, depth, builder.places]
    group = (tree.depth - 1).clamp(min=0)
    return replace(tree, valid=valid, drawn=DrawnFrom(found.law, group, vocabulary.chosen, found.replacement))

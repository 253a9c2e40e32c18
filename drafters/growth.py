"""From a drafter's laws to a draft tree: what all methods share, whatever their laws depend on.

`static_tree` crosses laws that depend on the depth alone (Medusa). `grow` goes level by level, for drafters whose laws
depend on the path: along a static topology, or where the drafter's own confidence leads (EAGLE-2's dynamic trees).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..core.proposals import Candidates, candidates
from ..core.tree import DraftTree, DrawnFrom, DynamicTree, TreeTopology, best_subtree, root_only, topology_builder
from .base import DraftRequest
from .modules import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes of one depth whose children are wanted.

    depth: 0 for the root. tokens [B, P] long. parents [B, P] long: place of each node's parent among the nodes of the
    level before. ancestors [B, P, M] bool: which of the M nodes that were asked for so far (this level's come last) lie
    on a node's path, itself included.
    """

    depth: int
    tokens: Tensor
    parents: Tensor
    ancestors: Tensor


Laws = Callable[[Level], Tensor]
"""What a drafter answers: unnormalised log-laws [B, P, Vd] of what follows each node of a level."""


def grow(
    shape: TreeTopology | DynamicTree, root: Tensor, laws: Laws, request: DraftRequest, vocabulary: DraftVocabulary
) -> DraftTree:
    """Grow a tree from a root [B] long, asking for the laws of one level after the other.

    Drawn nodes need a static topology: a tree that chooses among siblings by what was drawn biases the text.
    """
    if isinstance(shape, DynamicTree):
        nodes = min(shape.nodes, request.max_nodes or shape.nodes)
        depth = min(shape.depth, request.max_depth or shape.depth)
        return _grow_dynamic(replace(shape, nodes=max(nodes, 2), depth=depth), root, laws, request, vocabulary)
    topology = shape.cut(request.max_nodes, request.max_depth)
    return _grow_static(topology, root, laws, request, vocabulary) if topology.depth else root_only(root)


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
    rows = torch.arange(len(root), device=root.device)[:, None]
    valid = tree.valid.clone()
    valid[:, 1:] &= found.possible[rows, depth, builder.places]
    group = (tree.depth - 1).clamp(min=0)
    return replace(tree, valid=valid, drawn=DrawnFrom(found.law, group, vocabulary.chosen, found.replacement))


@dataclass(frozen=True, slots=True)
class _Step:
    """One level of a static topology; index tensors on the device.

    asked [P]: nodes that have children. parents [P]: their parents' places among the nodes asked for a level before.
    children [C]: the nodes that are filled. owner [C]: whose children they are, by place among `asked`. rank, place
    [C]: which candidate they take. seen [P, M]: ancestors among all nodes asked for so far.
    """

    asked: Tensor
    parents: Tensor
    children: Tensor
    owner: Tensor
    rank: Tensor
    place: Tensor
    seen: Tensor
    width: int


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the engine plans in inference mode, but others may use the plan outside of it
def _steps(topology: TreeTopology, device: torch.device) -> tuple[_Step, ...]:
    """Plan the levels of a topology."""
    parents, places = topology.parents, topology_builder(topology, device).places.tolist()
    ancestors = topology_builder(topology, device).expand(1).ancestors[0]
    inner = set(parents)
    steps, asked_before, asked_so_far = [], [-1], []
    for depth in range(topology.depth):
        asked = [node for node, at in enumerate(topology.depths) if at == depth and node in inner]
        children = [node for node, at in enumerate(topology.depths) if at == depth + 1]
        asked_so_far += asked

        def index(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        steps.append(
            _Step(
                asked=index(asked),
                parents=index([asked_before.index(parents[node]) for node in asked]),
                children=index(children),
                owner=index([asked.index(parents[node]) for node in children]),
                rank=index([topology.ranks[node] for node in children]),
                place=index([places[node - 1] for node in children]),
                seen=ancestors[index(asked)][:, index(asked_so_far)],
                width=max(topology.ranks[node] for node in children) + 1,
            )
        )
        asked_before = asked
    return tuple(steps)


def _grow_static(
    topology: TreeTopology, root: Tensor, laws: Laws, request: DraftRequest, vocabulary: DraftVocabulary
) -> DraftTree:
    batch, nodes = len(root), topology.num_nodes
    tokens = root[:, None].repeat(1, nodes)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    group, drawn_laws, replacement = torch.zeros_like(tokens), [], False
    for depth, step in enumerate(_steps(topology, root.device)):
        seen = step.seen.expand(batch, *step.seen.shape)
        scores = laws(Level(depth, tokens[:, step.asked], step.parents.expand(batch, -1), seen))
        found = _candidates(scores, step.width, depth, request, vocabulary)
        which = step.rank if found.law is None else step.place
        tokens[:, step.children] = vocabulary.to_target(found.index[:, step.owner, which])
        if found.law is not None and found.possible is not None:
            valid[:, step.children] = found.possible[:, step.owner, which]
            group[:, step.children] = sum(law.shape[1] for law in drawn_laws) + step.owner
            drawn_laws.append(found.law)
            replacement = found.replacement
    drawn = DrawnFrom(torch.cat(drawn_laws, 1), group, vocabulary.chosen, replacement) if drawn_laws else None
    shape = topology_builder(topology, root.device).expand(batch)
    return replace(shape, tokens=tokens, valid=valid, drawn=drawn)


def _grow_dynamic(
    shape: DynamicTree, root: Tensor, laws: Laws, request: DraftRequest, vocabulary: DraftVocabulary
) -> DraftTree:
    """Expand the most probable paths, then keep the best of all nodes that were scored."""
    if request.drawn:
        raise ValueError("drawn nodes need a static topology; use proposal='shared_noise' with a dynamic tree")
    batch, width = len(root), min(shape.width, vocabulary.size)
    itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=root.device)
    level = Level(0, root[:, None], torch.zeros_like(root[:, None]), itself)
    value = root.new_zeros(batch, 1, dtype=torch.float32)
    place = torch.full_like(root[:, None], -1)  # of the level's nodes among all scored ones
    tokens, parents, values = [], [], []
    for depth in range(shape.depth):
        found = _candidates(laws(level), width, depth, request, vocabulary)
        # strictly below the parent's value, or a certain child might be kept without it
        below = value.nextafter(value.new_tensor(-torch.inf))[:, :, None]
        scored = torch.minimum(value[:, :, None] + found.confidence(), below).flatten(1)
        start = sum(part.shape[1] for part in tokens)
        tokens.append(vocabulary.to_target(found.index).flatten(1))
        parents.append(place.repeat_interleave(width, dim=1))
        values.append(scored)
        if depth + 1 == shape.depth or (shape.stop_below and float(scored.max()) < math.log(shape.stop_below)):
            break
        best = scored.topk(min(shape.width, scored.shape[1]), dim=1)
        owner = best.indices // width
        rows = torch.arange(batch, device=root.device)[:, None]
        inherited = level.ancestors[rows, owner]
        itself = torch.eye(owner.shape[1], dtype=torch.bool, device=root.device).expand(batch, -1, -1)
        level = Level(depth + 1, tokens[-1].gather(1, best.indices), owner, torch.cat([inherited, itself], dim=2))
        value, place = best.values, best.indices + start
    pool = torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1)
    return best_subtree(root, *pool, shape.nodes)


def _candidates(
    scores: Tensor, width: int, depth: int, request: DraftRequest, vocabulary: DraftVocabulary
) -> Candidates:
    ahead = request.root_positions[:, None] + 1 + depth
    return candidates(scores, width, request.proposal, request.sampling, ahead, vocabulary.chosen)

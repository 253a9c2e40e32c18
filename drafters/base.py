"""The interfaces every drafter lives by, and the data that passes through them.

Shape letters, for the whole project:
    B rows, T tokens of a training sequence, N tree nodes with the root, A newly observed positions (right-padded),
    L cache columns, K draft depth, F feature layers, D target width, V target vocabulary, Vd draft vocabulary.

Features: an integer i is the raw output of decoder block i (0-based); "final" is the state after the final norm, what
the language-model head multiplies. `features[t]` has read `tokens[t]`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ..core.files import give_usual_mode
from ..core.kv_cache import RaggedCache
from ..core.sampling import Sampling
from ..core.tree import DraftTree, DynamicTree, TreeTopology
from .config import DrafterConfig
from .modules import DraftVocabulary, LogitScale, ZeroLinear

if TYPE_CHECKING:
    from typing_extensions import Self

FeatureLayer = int | str


class TargetView(Protocol):
    """What a drafter may ask of the target; passed in, never stored, so that checkpoints hold drafter weights only."""

    @property
    def width(self) -> int:
        """D."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the rows of the language-model head."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def config(self) -> Any:
        """The target's transformers configuration."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return input embeddings [..., D] of tokens [...]."""
        ...

    def logits(self, final: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return logits [..., V] of states after the final norm [..., D]; only those of token_ids [M] if given."""
        ...

    def head_rows(self, token_ids: Tensor | None) -> Tensor:
        """Return a copy of the head's weight rows [M, D] for the given ids [M], all of them for None."""
        ...

    def typical_state(self) -> Tensor:
        """Return final states [M, D] fp32 of a few arbitrary tokens, to measure scales from."""
        ...


@dataclass(frozen=True, slots=True)
class Observed:
    """What the target has just committed; the same shape after prefill and after a step.

    read_tokens [B, A] long: token at this position, which the feature has read.
    next_tokens [B, A] long: the token that follows it; the last valid one is the next root.
    features [B, A, F, D]: one per feature layer, in the drafter's order.
    positions [B, A] long. lengths [B] long: valid entries of each row; 0 for rows that took no part.
    """

    read_tokens: Tensor
    next_tokens: Tensor
    features: Tensor
    positions: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What this step may and should do.

    sampling: processors, temperature and, when sampling, the keyed noise the target is going to use.
    root_positions [B] long: position of each row's root.
    active [B] bool: finished rows get a root-only tree.
    max_nodes, max_depth: budget of the step, root included in max_nodes; None means no bound.
    proposal: how candidates come from the drafter's law, see `core/proposals.py`; drafters without a law ignore it.
    """

    sampling: Sampling
    root_positions: Tensor
    active: Tensor
    max_nodes: int | None = None
    max_depth: int | None = None
    proposal: str = "shared_noise"

    @property
    def drawn(self) -> bool:
        """Whether nodes are drawn from the drafter's law, for the classic rule, and not chosen."""
        return self.proposal.startswith("sampled") and self.sampling.noise is not None


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One training batch.

    tokens [B, T] long; token_mask [B, T] bool: False for padding.
    loss_mask [B, T] bool: `loss_mask[t]` says to learn to predict `tokens[t]`.
    positions, segments [B, T] long: several documents may be packed in a row.
    features [B, T, F, D]; final [B, T, D]: the state after the final norm, for losses against the target's law.
    """

    tokens: Tensor
    token_mask: Tensor
    loss_mask: Tensor
    positions: Tensor
    segments: Tensor
    features: Tensor
    final: Tensor


@dataclass
class LossOutput(ModelOutput):
    """What training needs of one forward pass.

    loss: scalar to minimise, already divided by the number of trained tokens it was told.
    sums, counts, hits [K] fp32: per depth, the un-weighted loss sum, the number of labels, and how often the drafter's
    best guess was the label.
    ranks [B, T, K] long: how many candidates of depth k the drafter at position t ranks above the true token; -1 where
        there is no label or it lies outside the draft vocabulary. Only in eval mode; topologies are chosen from it.
    """

    loss: Tensor | None = None
    sums: Tensor | None = None
    counts: Tensor | None = None
    hits: Tensor | None = None
    ranks: Tensor | None = None


@dataclass
class DraftState:
    """What a drafter remembers of each row between steps; fields are tensors with rows first, caches or None."""

    def take_rows(self, rows: Tensor) -> Self:
        """Return the state of the given rows [R] long, in that order (caches are changed in place)."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, RaggedCache):
                value.take_rows(rows)
            elif isinstance(value, Tensor):
                value = value[rows]
            taken[field.name] = value
        return replace(self, **taken)

    def replace_rows(self, rows: Tensor, other: Self) -> Self:
        """Return the state with `rows` [R] long taken over by the other's rows (caches are changed in place)."""
        merged: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, RaggedCache):
                mine.replace_rows(rows, theirs)
            elif isinstance(mine, Tensor):
                mine = mine.index_copy(0, rows, theirs)
            merged[field.name] = mine
        return replace(self, **merged)

    def compact(self, threshold: float) -> None:
        """Remove holes from caches, see `RaggedCache.compact`."""
        for value in (getattr(self, field.name) for field in fields(self)):
            if isinstance(value, RaggedCache):
                value.compact(threshold)


class Drafter(PreTrainedModel, ABC):
    """A small module that guesses several tokens ahead. Abstract: a method is one final subclass in one file.

    `observe` is always called after prefill and after every step; `propose` may be skipped in a step without harm. Both
    may change the state they are given, never the drafter itself.
    """

    config_class = DrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "tokens"
    trains_target: ClassVar[bool] = False
    yields_law: ClassVar[bool] = False
    """Whether guesses come from a law over tokens, so that every proposal of `core/proposals.py` is available, and the
    law may be one over a draft vocabulary."""
    vocabulary: DraftVocabulary
    """The tokens that the law is about; drafters without a law have none. (A value here would hide the module.)"""
    default_topology: ClassVar[Sequence[Sequence[int]] | None] = None
    """The method's static tree until training has measured a better one; None for drafters that draw their own."""
    topology: TreeTopology | None = None
    """The static tree, cut to what the drafter can guess."""
    dynamic: DynamicTree | None = None
    """If set, trees follow the drafter's confidence; drawn nodes still use the static one."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if self.yields_law:
            self.vocabulary = DraftVocabulary(config.draft_vocab_size, config.target_vocab_size)
        if self.default_topology is None:
            return
        wanted = TreeTopology.from_paths(config.topology or self.default_topology)
        if config.topology is not None and wanted.depth > self.draft_depth:
            warnings.warn(
                f"the topology is {wanted.depth} deep, but this drafter guesses only {self.draft_depth} tokens ahead; "
                "deeper nodes are left out",
                stacklevel=3,
            )
        self.topology = wanted.cut(max_depth=self.draft_depth)
        if config.dynamic_tree is not None:
            self.set_dynamic_tree(DynamicTree(**config.dynamic_tree))

    @property
    def draft_depth(self) -> int:
        """K: how many tokens ahead the drafter can guess."""
        raise NotImplementedError(f"{type(self).__name__} must say how deep it guesses")

    @property
    def feature_layers(self) -> tuple[FeatureLayer, ...]:
        """What to capture from the target: block numbers (0-based) or "final"."""
        return ("final",)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave modules as PyTorch starts them, or at zero; `initialise_from` holds the rest of a method's rule."""
        if isinstance(module, (ZeroLinear, LogitScale)):
            module.reset_parameters()

    @abstractmethod
    def initialise_from(self, target: TargetView) -> None:
        """Copy what the method takes from the target's weights; called once, when a fresh drafter is built."""

    @abstractmethod
    def init_state(self, batch_size: int) -> DraftState:
        """Return the state of rows of which nothing has been observed."""

    @abstractmethod
    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Take in what was committed; rows of length 0 keep their state."""

    @abstractmethod
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Guess: a tree whose node 0 is the last committed token of each row."""

    @abstractmethod
    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the training loss.

        num_items: trained tokens of the whole optimizer step over all ranks; None means those of this batch.
        """

    @property
    def draft_token_ids(self) -> Tensor | None:
        """The target tokens [Vd] long that the drafter can guess; None means all of them."""
        return self.vocabulary.chosen if self.yields_law else None

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Fix which target tokens [Vd] long (sorted) the drafter can guess; before `initialise_from`."""
        if not self.yields_law:
            raise ValueError(f"{type(self).__name__} has no draft vocabulary; leave draft_vocab_size unset")
        self.vocabulary.choose(token_ids)

    def set_topology(self, paths: Sequence[Sequence[int]]) -> None:
        """Use another static tree from now on, in place of any other kind; see `fit_topology`."""
        self.fit_topology(paths)
        self.set_dynamic_tree(None)

    def fit_topology(self, paths: Sequence[Sequence[int]]) -> None:
        """Exchange the static tree, and save it with the drafter; deeper nodes than it can guess are cut.

        A drafter that is set to another kind of tree (dynamic, beams) keeps to that; drawn nodes use the static one.
        Raises ValueError for malformed paths and for drafters that draw their own trees.
        """
        if self.default_topology is None:
            raise ValueError(f"{type(self).__name__} draws its own trees; it takes no topology")
        self.topology = TreeTopology.from_paths(paths).cut(max_depth=self.draft_depth)
        self.config.topology = self.topology.paths()

    def set_dynamic_tree(self, tree: DynamicTree | None) -> None:
        """Let trees follow the drafter's confidence from now on, or for None the static topology; saved with it."""
        self.dynamic = None if tree is None else replace(tree, depth=min(tree.depth, self.draft_depth))
        self.config.dynamic_tree = None if self.dynamic is None else asdict(self.dynamic)

    @property
    def fixed_topology(self) -> TreeTopology | None:
        """The static tree where that is what the drafter draws; None where another kind is set."""
        return self.topology if self.dynamic is None else None

    @property
    def tree_told(self) -> str:
        """What trees the drafter draws, in words; nodes that are drawn from its law always take the static one."""
        if self.dynamic is not None:
            return f"dynamic tree, up to {self.dynamic.nodes} nodes, depth {self.dynamic.depth}"
        if self.topology is None:
            return "trees of its own"
        return f"static tree, {self.topology.num_nodes} nodes, depth {self.topology.depth}"

    def tree_shape(self, request: DraftRequest) -> TreeTopology | DynamicTree:
        """Return the shape of a step's tree: drawn nodes need a static one."""
        assert self.topology is not None
        return self.topology if self.dynamic is None or request.drawn else self.dynamic

    def learning_rate_scales(self) -> dict[str, float]:
        """Return factors on the learning rate by a part of the parameter's name; 1.0 for everything else."""
        return {"logit_scale": LogitScale.RATE}

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, the weights as readable as config.json is."""
        super().save_pretrained(save_directory, *args, **kwargs)
        for path in Path(save_directory).glob("model*.safetensors"):
            give_usual_mode(path)

    def check_fits(self, target: TargetView) -> None:
        """Raise ValueError unless the drafter was made for a target of these sizes."""
        wanted = (self.config.target_vocab_size, self.config.target_width)
        found = (target.vocab_size, target.width)
        if wanted != found:
            made_for = f" ({self.config.target_name})" if self.config.target_name else ""
            raise ValueError(
                f"drafter was trained for a target{made_for} with V={wanted[0]}, D={wanted[1]}, but this one has "
                f"V={found[0]}, D={found[1]}; load the matching target"
            )

"""Every setting of a training run: transformers' own `TrainingArguments`, ours, and the fields of a drafter's config.

Flags and YAML keys are the names of these fields. How they are read is `command_line.py`'s business.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from ..drafters.registry import drafter_classes
from ..inference.loading import DTYPES
from .optimizers import MUON
from .processes import without_gpu


def told(text: str, **metadata: Any) -> dict[str, Any]:
    """Return a field's metadata: its help text, and choices if it has some."""
    return {"help": text, **metadata}


@dataclass
class TargetArguments:
    """Which language model the drafter is for."""

    _argument_group_name: ClassVar[str] = "target"

    target: str | None = field(
        default=None, metadata=told("The target: a folder, or a Hub id like owner/name. Required.")
    )
    target_revision: str | None = field(default=None, metadata=told("Branch, tag or commit of a Hub target."))
    target_dtype: str = field(
        default="auto",
        metadata=told("Type of the target's weights; auto keeps the checkpoint's.", choices=list(DTYPES)),
    )
    load_in_4bit: bool = field(default=False, metadata=told("Load the target in 4 bit (needs bitsandbytes and a GPU)."))
    load_in_8bit: bool = field(default=False, metadata=told("Load the target in 8 bit (needs bitsandbytes and a GPU)."))

    @property
    def bits(self) -> int | None:
        """Bits of a quantised target, None for an ordinary one."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    def __post_init__(self) -> None:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("a target is loaded in 4 bit or in 8 bit, but both were asked for; drop one")


@dataclass
class DataArguments:
    """What the drafter learns from."""

    _argument_group_name: ClassVar[str] = "data"

    train_data: list[str] = field(
        default_factory=list,
        metadata=told(
            "Files or folders of answers (`headstart distill`) or conversations, or Hub data sets. Required."
        ),
    )
    eval_data: list[str] = field(
        default_factory=list,
        metadata=told("Held-out data of the same kinds; by default a part of train_data is held out."),
    )
    held_out_fraction: float = field(
        default=0.05, metadata=told("Share of train_data's rows held out where eval_data is not given.")
    )
    max_length: int = field(default=2048, metadata=told("Longer rows keep their front."))
    packing: bool = field(
        default=False,
        metadata=told(
            "Have several short rows of a step share a sequence of at most max_length tokens, each seeing only itself: "
            "less padding, the same losses."
        ),
    )
    streaming: bool = field(
        default=False,
        metadata=told(
            "For data larger than memory: rows are tokenised once into a file of the data sets' cache "
            "(HF_DATASETS_CACHE) and read from there, not held in memory. Data files only."
        ),
    )
    train_on: Literal["all", "last"] = field(
        default="all", metadata=told("Assistant turns of conversations to train: all, or the last.")
    )
    feature_cache_gb: float = field(
        default=0.0,
        metadata=told(
            "Memory of each process, in GB, for features of rows it has seen: the target then reads each row once and "
            "alone, not once an epoch in a batch. 0: features are made anew."
        ),
    )

    features: str | None = field(
        default=None,
        metadata=told(
            "Folder of `headstart distill capture`: features are read from there, and the target is not run for them."
        ),
    )
    missing_features: Literal["refuse", "make"] = field(
        default="refuse",
        metadata=told(
            "Rows that the folder of `features` lacks: refuse the run, or make them with the target whenever they are "
            "read."
        ),
    )
    delete_features_after_use: bool = field(
        default=False,
        metadata=told(
            "Delete each shard of the folder of `features` when the rest of the run reads none of its rows: for a "
            "store that is used once."
        ),
    )

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, but is {self.max_length}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be at least 0 and below 1, but is {self.held_out_fraction}")
        if self.features is None and (self.missing_features != "refuse" or self.delete_features_after_use):
            idle = "delete_features_after_use" if self.delete_features_after_use else "missing_features"
            raise ValueError(f"{idle} has no effect without features; name the folder of a store, or leave it out")


@dataclass
class EvaluationArguments:
    """What is measured on held-out rows, and the tree chosen from it."""

    _argument_group_name: ClassVar[str] = "evaluation"

    eval_prompts: int = field(
        default=16, metadata=told("Held-out prompts to generate from at every evaluation, for true tokens per step.")
    )
    eval_new_tokens: int = field(default=128, metadata=told("Tokens to generate for each of them."))
    tree_nodes: int = field(
        default=16, metadata=told("Nodes of the draft tree chosen at every evaluation, the root included.")
    )

    def __post_init__(self) -> None:
        for name, least in (("eval_prompts", 0), ("eval_new_tokens", 2), ("tree_nodes", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, but is {getattr(self, name)}")


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with defaults that suit drafters.

    resume_from_checkpoint: "auto" goes on from the last checkpoint in output_dir, "never" starts anew, a path goes on
    from there.
    """

    _argument_group_name: ClassVar[str] = "training (transformers' own arguments)"

    output_dir: str | None = field(
        default=None, metadata=told("Where the drafter, its checkpoints and its records go. Required.")
    )
    resume_from_checkpoint: str | None = field(
        default="auto",
        metadata=told(
            "auto: go on from the last checkpoint in output_dir, if any; never: start anew; or a checkpoint folder."
        ),
    )
    start_from: str | None = field(
        default=None,
        metadata=told(
            "Folder or Hub id of a drafter whose weights and draft vocabulary the run begins with, to go on with other "
            "data or jointly with the target; by default a fresh one."
        ),
    )
    learning_rate: float = field(
        default=1e-3, metadata=told("Peak learning rate; a drafter may scale it for some of its parameters.")
    )
    optim: str = field(
        default=TrainingArguments.default_optim,
        metadata=told(
            "The optimizer. muon: Muon for the drafter's hidden matrices, AdamW for everything else; the others are "
            "transformers'.",
            choices=[MUON, *(name.value for name in OptimizerNames)],
        ),
    )
    lr_scheduler_type: str = field(default="cosine", metadata=told("The learning rate's schedule."))
    warmup_steps: float = field(
        default=0.05, metadata=told("Steps of linear warm-up: a count, or a share of all steps if below 1.")
    )
    logging_steps: float = field(default=10, metadata=told("Steps between log lines."))
    logging_nan_inf_filter: bool = field(
        default=False, metadata=told("No effect here: a loss that is not finite stops the run.")
    )
    eval_strategy: IntervalStrategy | str = field(
        default="epoch", metadata=told("When to evaluate: no, steps or epoch.")
    )
    save_strategy: SaveStrategy | str = field(
        default="epoch", metadata=told("When to save a checkpoint: no, steps, epoch or best.")
    )
    save_total_limit: int | None = field(default=2, metadata=told("Most checkpoints to keep."))
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata=told("Leave it off: every parameter of a drafter takes part in every batch.")
    )
    remove_unused_columns: bool = field(default=False, metadata=told("No effect here: rows are not tables."))
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata=told(
            "Order of the rows. group_by_length draws each step's rows at random and sorts them by length into "
            "batches, so that little is padded.",
            choices=["random", "sequential", "group_by_length"],
        ),
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if without_gpu() and isinstance(self.accelerator_config, dict | None):
            self.accelerator_config = {**(self.accelerator_config or {}), "use_configured_state": True}
        muon = self.optim == MUON
        if muon:
            self.optim = TrainingArguments.default_optim  # of everything else; transformers refuses names it has not
        super().__post_init__()
        if muon:
            self.optim = MUON
        self.idle_gpus = max(0, self.n_gpu - 1)
        if self.n_gpu > 1:
            self._n_gpu = 1  # one process drives one GPU; Trainer's DataParallel would cut our batches


def drafter_arguments(method: str) -> type:
    """Return a dataclass of the fields of a method's configuration, taken from its `__init__`."""
    config_class, _ = drafter_classes(method)
    hints = {name: _flag(hint) for name, hint in get_type_hints(config_class.__init__).items()}
    parameters = list(inspect.signature(config_class.__init__).parameters.values())[1:]
    texts = texts_of(config_class)
    fields: list[tuple[str, Any, Any]] = [
        (p.name, hints[p.name], _field(p.default, texts.get(p.name, f"See `{config_class.__name__}`.")))
        for p in parameters
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    vocabulary = field(
        default=None,
        metadata=told("Target tokens the drafter can guess: the most frequent of the data; by default all."),
    )
    tree = field(
        default=None,
        metadata=told(
            "Fields of `DynamicTree` (nodes, depth, width, stop_below): trees follow the drafter's confidence instead "
            "of a static shape."
        ),
    )
    fields += [("draft_vocab_size", int | None, vocabulary), ("dynamic_tree", mapping, tree)]
    namespace = {"_argument_group_name": f"drafter ({method})", "__doc__": f"Fields of `{config_class.__name__}`."}
    return make_dataclass("DrafterArguments", fields, namespace=namespace)


def texts_of(config_class: type) -> dict[str, str]:
    """Return what a configuration's docstring says of its fields, in parts like `num_heads: how many there are`.

    Fields that share a part (`width, height: in pixels`) share the text.
    """
    names = "|".join(list(inspect.signature(config_class.__init__).parameters)[1:])
    doc = " ".join((inspect.getdoc(config_class) or "").split())
    parts = re.split(rf"(?:^|(?<=\.) )((?:{names})(?:, (?:{names}))*): ", doc)
    texts = {}
    for fields, text in zip(parts[1::2], parts[2::2], strict=True):
        shared = f"{fields.replace(', ', ' and ')}: {text}" if ", " in fields else text[0].upper() + text[1:]
        texts |= dict.fromkeys(fields.split(", "), shared)
    return texts


def mapping(text: str) -> dict[str, Any]:
    """Read a mapping from a flag; those of a YAML file arrive as JSON. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it must be a mapping in JSON, but is {text}")
    return value


def _flag(hint: Any) -> Any:
    """Return what reads a flag of this type: transformers' parser knows no mappings."""
    return mapping if any(get_origin(kind) is dict for kind in get_args(hint)) else hint


def _field(default: Any, text: str) -> Any:
    assert default is not inspect.Parameter.empty, "the fields of a drafter's configuration have defaults"
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default), metadata=told(text))
    return field(default=default, metadata=told(text))

"""How a target is trained beside its drafter: by a LoRA adapter, or whole; what it was before is always at hand.

Knows the weights that change, how they are saved and found again, and how to be the original for a moment. Losses and
schedules are `joint.py`'s business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..inference.adapters import ADAPTER, TARGET, WEIGHTS, fingerprint, quiet_peft, require_peft
from ..inference.target import Target
from .evaluation import as_served
from .joint_arguments import JointArguments


class TrainedTarget(ABC):
    """A target whose weights, or some beside them, are trained. Abstract: an adapter, or the whole target.

    dtype: the type in which it is served. base: fingerprint of the original. trained: what is trained of it, by name.
    """

    trained: dict[str, nn.Parameter]

    def __init__(self, target: Target) -> None:
        self.target = target
        self.dtype = target.dtype
        found = fingerprint(target.model)
        if found.adapter is not None:
            raise ValueError("the target must come without an adapter to be trained, but carries one; load it anew")
        self.base = found.base

    @abstractmethod
    def original(self, module: nn.Module) -> AbstractContextManager[None]:
        """Make the target, or a module of it, what it was before training; for as long as the context lasts."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what is trained, and nothing frozen, into a folder of its own below `folder`."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` has written."""

    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """Return what a drafter's config says of its target; see `adapt`."""

    def served(self) -> AbstractContextManager[None]:
        """Give what is trained the type in which the target is served, for as long as the context lasts."""
        return as_served(nn.ParameterList(self.trained.values()), self.dtype)

    def let_learn(self, learning: bool) -> None:
        """Let what is trained take part in gradients, or not."""
        for parameter in self.trained.values():
            parameter.requires_grad_(learning)

    def head(self) -> nn.Module:
        """Return the language-model head."""
        head = self.target.model.get_output_embeddings()
        assert head is not None
        return head


def trained_target(target: Target, settings: JointArguments) -> TrainedTarget:
    """Prepare a frozen target for training as the settings say."""
    if settings.train_target == "none":
        return FrozenTarget(target)
    return LoraTarget(target, settings) if settings.train_target == "lora" else WholeTarget(target)


class FrozenTarget(TrainedTarget):
    """A target of which nothing is trained: it stands beside the drafter to be cut up with it."""

    def __init__(self, target: Target) -> None:
        self.target, self.dtype, self.trained = target, target.dtype, {}

    def original(self, module: nn.Module) -> AbstractContextManager[None]:
        """Nothing to undo."""
        return nullcontext()

    def save(self, folder: Path) -> None:
        """Nothing to write."""

    def load(self, folder: Path) -> None:
        """Nothing to read."""

    def identity(self) -> None:
        """The target is what it was."""
        return None


class LoraTarget(TrainedTarget):
    """A frozen target with a LoRA adapter, trained in fp32. The original is the target with the adapter off."""

    def __init__(self, target: Target, settings: JointArguments) -> None:
        require_peft()
        from peft import LoraConfig, get_peft_model

        super().__init__(target)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=adapted_layers(target.model, settings.lora_target_modules),
        )
        with quiet_peft():
            self.layers = get_peft_model(target.model, config)
        self.trained = {name: p for name, p in target.model.named_parameters() if p.requires_grad}

    @contextmanager
    def original(self, module: nn.Module) -> Iterator[None]:
        """Switch the adapter off."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in adapted:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in adapted:
                layer.enable_adapters(True)

    def save(self, folder: Path) -> None:
        """Write peft's own two files."""
        with quiet_peft():
            self.layers.save_pretrained(str(folder / ADAPTER), save_embedding_layers=False)
        (folder / ADAPTER / "README.md").unlink(missing_ok=True)  # peft's empty model card

    def load(self, folder: Path) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.layers, load_file(folder / ADAPTER / WEIGHTS))

    def identity(self) -> dict[str, Any]:
        adapter = fingerprint(self.target.model).adapter
        return {"trained": "lora", "base": self.base, "adapter": adapter, "dtype": _name(self.dtype)}

    def save_merged(self, folder: Path) -> str:
        """Write the whole target with the adapter added to its weights; return its fingerprint, read back from there.

        A head that is tied to the embeddings and adapted then stands on its own, since the embeddings do not change.
        """
        from peft.tuners.lora import LoraLayer

        model, untied = self.target.model, False
        states = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items() if ".lora_" not in name}
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                own = states[f"{name}.weight"]
                added: Any = layer.get_delta_weight("default")  # type: ignore[operator]
                states[f"{name}.weight"] = (own + added).to(own.dtype)
                untied |= layer is self.head()
        tied = model.config.tie_word_embeddings
        model.config.tie_word_embeddings = tied and not untied
        try:
            model.save_pretrained(str(folder / TARGET), state_dict=states)
        finally:
            model.config.tie_word_embeddings = tied
        return fingerprint(AutoModelForCausalLM.from_pretrained(folder / TARGET)).base


class WholeTarget(TrainedTarget):
    """A target all of whose weights are trained, in fp32 at least; the original weights are kept beside them."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        parameters = list(target.model.parameters())
        self._before = {id(p): p.detach().clone() for p in parameters}
        if self.dtype in (torch.bfloat16, torch.float16):
            target.model.float()  # small steps would be lost in rounding
        target.model.requires_grad_(True)
        self.trained = dict(target.model.named_parameters())

    @contextmanager
    def original(self, module: nn.Module) -> Iterator[None]:
        """Exchange the weights; the very tensors come back."""
        parameters = list(module.parameters())
        own = [p.data for p in parameters]
        for parameter in parameters:
            parameter.data = self._before[id(parameter)]
        try:
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data

    def save(self, folder: Path) -> None:
        """Write the whole target."""
        self.target.model.save_pretrained(str(folder / TARGET))

    def load(self, folder: Path) -> None:
        saved: Any = AutoModelForCausalLM.from_pretrained(folder / TARGET, dtype=self.target.dtype)
        self.target.model.load_state_dict(saved.state_dict())

    def identity(self) -> dict[str, Any]:
        with self.served():
            whole = fingerprint(self.target.model).base
        return {"trained": "full", "base": self.base, "whole": whole, "dtype": _name(self.dtype)}


def adapted_layers(model: PreTrainedModel, wanted: list[str]) -> list[str]:
    """Return the last names of the linear layers to adapt: those wanted, by default all, the head included.

    Raises ValueError for a name that no linear layer has, with the nearest.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = sorted({name.rpartition(".")[2] for name in linear})
    for name in wanted:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"lora_target_modules must be of {', '.join(names)}, but one is {name!r}{hint}")
    return sorted(wanted) or names


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

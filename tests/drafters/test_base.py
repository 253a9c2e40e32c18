"""What every drafter gets from the base class."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tiny_drafters import oracle_drafter
from tiny_targets import layers_of, make_model, tiny_target
from torch import Tensor

from headstart.core.kv_cache import RaggedCache
from headstart.drafters.base import DraftState
from headstart.drafters.config import DrafterConfig
from headstart.drafters.hydra import HydraConfig
from headstart.drafters.medusa import MedusaConfig
from headstart.drafters.modules import LogitScale
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.target import Target


@dataclass
class _State(DraftState):
    feature: Tensor
    cache: RaggedCache
    nothing: None = None


def test_state_takes_the_rows_of_its_tensors_and_caches() -> None:
    cache = RaggedCache(3, torch.device("cpu"))
    keys = torch.arange(3.0).view(3, 1, 1, 1)
    cache.kv.update(keys, keys, 0)
    cache.commit(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long))
    taken = _State(torch.tensor([10, 11, 12]), cache).take_rows(torch.tensor([2, 0]))
    assert taken.feature.tolist() == [12, 10]
    assert taken.cache.batch_size == 2
    assert layers_of(taken.cache)[0].keys.flatten().tolist() == [2.0, 0.0]
    assert taken.nothing is None


def test_drafter_of_another_target_is_refused_with_both_sizes() -> None:
    wide = Target(make_model("llama", tiny_target("llama").config.to_dict() | {"vocab_size": 80}))
    with pytest.raises(ValueError, match="V=64, D=32, but this one has V=80, D=32; load the matching target"):
        SpeculativeEngine(wide, oracle_drafter([[1, 2, 3]], 1))


def test_name_of_the_target_it_was_made_for_stands_in_the_refusal() -> None:
    drafter = oracle_drafter([[1, 2, 3]], 1)
    drafter.config = DrafterConfig(target_vocab_size=9, target_width=9, target_name="owner/other")
    with pytest.raises(ValueError, match=r"for a target \(owner/other\) with V=9"):
        drafter.check_fits(tiny_target("llama"))


def test_settings_that_a_method_does_not_have_are_refused_by_name() -> None:
    drafter = oracle_drafter([[1, 2, 3]], 1)
    with pytest.raises(ValueError, match="ScriptedDrafter has no draft vocabulary"):
        drafter.set_draft_vocabulary(torch.tensor([1]))
    with pytest.raises(ValueError, match="ScriptedDrafter draws its own trees"):
        drafter.set_topology([[0]])
    assert drafter.learning_rate_scales() == {"logit_scale": LogitScale.RATE}


def test_configuration_keeps_its_fields_through_json() -> None:
    config = DrafterConfig(target_name="t", topology=[(0,), (0, 0)], training_data={"rows": 3}, draft_vocab_size=7)
    again = DrafterConfig.from_dict(config.to_dict())
    assert again.topology == [[0], [0, 0]]
    assert (again.target_name, again.training_data, again.draft_vocab_size, again.measured) == ("t", {"rows": 3}, 7, {})


@pytest.mark.parametrize("config", [MedusaConfig, HydraConfig])
def test_settings_without_sense_are_refused_by_name(config: type[MedusaConfig] | type[HydraConfig]) -> None:
    with pytest.raises(ValueError, match="num_heads must be at least 1, but is 0"):
        config(num_heads=0)
    with pytest.raises(ValueError, match="num_layers must be at least 1, but is 0"):
        config(num_layers=0)
    with pytest.raises(ValueError, match=r"loss must be 'kl' or .* or 'ce', but is 'mse'"):
        config(loss="mse")

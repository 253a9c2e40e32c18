"""Replays docs/tree.md: every number of the page is read from it and held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from tiny_targets import layers_of
from transformers import LogitsProcessorList

from headstart.core.kv_cache import RaggedCache
from headstart.core.masks import block_mask
from headstart.core.sampling import Sampling
from headstart.core.tree import DraftTree, TopologyBuilder, TreeTopology
from headstart.inference.engine import _emitted_tokens
from headstart.inference.verify import Lossless, Prefixes, Question, Verdict

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tree.md").read_text(encoding="utf-8")
VOCAB = 100


def section(number: int) -> str:
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[number]


def table(text: str) -> dict[str, list[str]]:
    """Return a Markdown table as its first column -> the other cells."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def numbers(cells: list[str]) -> list[int]:
    return [int(cell) for cell in cells]


def stated(label: str) -> list[int]:
    (line,) = re.findall(rf"^{label} +([\d ]+)$", section(4), flags=re.MULTILINE)
    return numbers(line.split())


@pytest.fixture
def tree() -> DraftTree:
    ranked = [numbers(cells) for depth, cells in table(section(2).split("```")[0]).items() if depth != "depth"]
    paths = yaml.safe_load(section(2).split("```yaml")[1].split("```")[0])["topology"]
    root = torch.tensor([numbers(table(section(2).split("```")[2])["token"])[0]])
    return TopologyBuilder(TreeTopology.from_paths(paths), torch.device("cpu")).build(root, torch.tensor([ranked]))


@pytest.fixture
def nodes() -> dict[str, list[str]]:
    return table(section(2).split("```")[2])


@pytest.fixture
def verdict(tree: DraftTree) -> Verdict:
    picks = torch.tensor([numbers(table(section(4))["pick"])])
    logits = torch.nn.functional.one_hot(picks, VOCAB).float()
    root = Prefixes(tree.tokens[:, :1], [1])
    greedy = Sampling(LogitsProcessorList(), None)
    return Lossless().verify(Question(tree, logits, greedy, torch.tensor([6]), root))


def test_root_stands_behind_the_cache_at_the_position_that_counts_it() -> None:
    start = table(section(1))
    assert numbers(start["position"]) == list(range(6)) == numbers(start["column"])
    assert len(start["token"]) == 6
    assert "token 17 at position 6" in section(1)


def test_topology_and_candidates_give_the_nodes_of_the_page(tree: DraftTree, nodes: dict[str, list[str]]) -> None:
    assert tree.tokens[0].tolist() == numbers(nodes["token"])
    assert tree.parents[0].tolist() == numbers(nodes["parent"])
    assert tree.depth[0].tolist() == numbers(nodes["depth"])
    assert (6 + tree.depth[0]).tolist() == numbers(nodes["position"])
    paths = yaml.safe_load(section(2).split("```yaml")[1].split("```")[0])["topology"]
    assert nodes["path"] == ["root", *(",".join(map(str, path)) for path in TreeTopology.from_paths(paths).paths())]


def test_mask_of_the_block_is_the_one_of_the_page(tree: DraftTree) -> None:
    mask = block_mask(torch.ones(1, 6, dtype=torch.bool), tree.ancestors)[0].int()
    shown = ["".join(map(str, row[:6].tolist())) + " " + "".join(map(str, row[6:].tolist())) for row in mask]
    assert re.findall(r"^node \d +([01]+ [01]+)$", section(3), flags=re.MULTILINE) == shown


def test_walk_accepts_the_path_of_the_page_and_emits_its_tokens(tree: DraftTree, verdict: Verdict) -> None:
    length = int(verdict.lengths)
    assert verdict.nodes[0, :length].tolist() == stated("accepted path")
    assert verdict.bonus.tolist() == stated("bonus token")
    emitted = _emitted_tokens(tree.tokens.gather(1, verdict.nodes), verdict)
    assert emitted[0, :length].tolist() == stated("emitted")


def filled_cache(rows: int) -> RaggedCache:
    """Return a cache with six committed columns and an uncommitted block of six nodes; each key is its column."""
    cache = RaggedCache(rows, torch.device("cpu"))
    for start in (0, 6):
        keys = torch.arange(start, start + 6.0).view(1, 1, 6, 1).expand(rows, 1, 6, 1)
        cache.kv.update(keys, keys, 0)
        if start == 0:
            cache.commit(torch.arange(6).expand(rows, 6), torch.full((rows,), 6))
    return cache


def test_commit_moves_the_columns_of_the_page(verdict: Verdict) -> None:
    cache = filled_cache(1)
    cache.commit(verdict.nodes, verdict.lengths)
    moves = table(section(5))
    expected = {
        int(to): int(column)
        for column, to in zip(moves["block column"], moves["moves to column"], strict=True)
        if to != "-"
    }
    keys = layers_of(cache)[0].keys
    assert {column: int(keys[0, 0, column, 0]) for column in range(6, cache.columns)} == expected
    assert numbers(moves["node"]) == [int(column) - 6 for column in moves["block column"]]
    assert "holds nine tokens, at positions 0 to 8" in section(5) and int(cache.lengths) == 9
    assert cache.positions[0].tolist() == list(range(9))


def test_row_that_accepted_less_has_the_holes_of_the_page(verdict: Verdict) -> None:
    cache = filled_cache(2)
    cache.commit(torch.cat([verdict.nodes, torch.zeros_like(verdict.nodes)]), torch.tensor([3, 1]))
    holes = table(section(5).split("realigned:")[1])
    assert cache.valid[:, 6:].int().tolist() == [numbers(holes["first row valid"]), numbers(holes["second row valid"])]
    assert numbers(holes["column"]) == list(range(6, cache.columns))


def test_drafter_observes_the_pairs_of_the_page(tree: DraftTree, verdict: Verdict) -> None:
    observed = table(section(6))
    path = verdict.nodes[0, : int(verdict.lengths)]
    read = tree.tokens.gather(1, verdict.nodes)
    assert numbers(observed["node"]) == path.tolist()
    assert numbers(observed["position"]) == (6 + tree.depth[0, path]).tolist()
    assert numbers(observed["read token"]) == read[0].tolist()
    assert numbers(observed["next token"]) == _emitted_tokens(read, verdict)[0].tolist()

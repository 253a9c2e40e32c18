"""Tokenised rows kept on the disk under the Hugging Face data sets' cache: made once, then mapped into memory.

A folder for each way in which rows were made; its name is a hash of all that decides them: the bytes of the data files,
tokenizer, chat template, settings, and the code that makes rows. So rows of another time are never taken for those
asked for. The folder gets its name when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..core import prompts, rows, spans
from . import dataset, table
from .capture import data_fingerprints
from .dataset import DatasetReport, TokenDataset, token_rows
from .shards import locked
from .table import RowTable, TokenRow, write_rows

ROWS, REPORT = "rows.arrow", "report.json"
MADE_BY = (prompts, rows, spans, dataset, table)
"""The code that makes rows; where it changes, they are made again."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")
ABANDONED = 24 * 3600
"""Seconds after which a folder that nobody has written to is taken for what a killed process left."""


def cache_folder() -> Path:
    """Return where tokenised rows lie: `headstart` under the cache of the datasets library (HF_DATASETS_CACHE)."""
    from datasets import config  # slow to import, and only needed here

    return Path(config.HF_DATASETS_CACHE) / "headstart"


def load_mapped(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 2048,
    train_on: Literal["all", "last"] = "all",
    progress: bool = False,
) -> tuple[TokenDataset, str]:
    """Do what `load_dataset` does with data files, but leave the rows on the disk; also say where they lie.

    Raises ValueError as `load_dataset` does, and for data sets of the Hub.
    """
    for source in sources:
        if not Path(source).exists():
            raise ValueError(
                f"streaming reads data files and folders of them, but {source} is none: of a data set of the Hub, "
                "download the files first and name their folder, or leave streaming out"
            )
    folder = cache_folder() / _key(sources, tokenizer, max_length, train_on)
    found = (folder / REPORT).is_file()
    if not found:
        lock = folder.with_suffix(".lock")
        lock.mkdir(parents=True, exist_ok=True)
        with locked(lock, alone=True, refusal=None):  # of several processes one writes, however long it takes
            found = (folder / REPORT).is_file()
            if not found:
                report = DatasetReport()
                made = token_rows(sources, tokenizer, report, max_length, train_on)
                bar = tqdm(made, desc="tokenising", unit="row", disable=not progress, dynamic_ncols=True)
                _write(bar, report, folder)
    report = DatasetReport(**json.loads((folder / REPORT).read_text(encoding="utf-8")))
    report.dropped = Counter(report.dropped)
    told = f"tokenised rows {'found' if found else 'written'} in {folder}"
    return TokenDataset(RowTable(folder / ROWS), report), told


def _key(sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, train_on: str) -> str:
    decides = {
        "data": data_fingerprints(sources),
        "tokenizer": prompts.tokenizer_fingerprint(tokenizer),
        "chat_template": prompts.template_fingerprint(tokenizer),
        "max_length": max_length,
        "train_on": train_on,
        "code": [hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in MADE_BY],
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def _write(made: Iterable[TokenRow], report: DatasetReport, folder: Path) -> None:
    """Write rows and report into a folder that is there whole or not at all; another process may have been faster."""
    for left in folder.parent.glob(f"{folder.name}.partial-*"):
        written = max((path.stat().st_mtime for path in (left, *left.iterdir())), default=0.0)
        if time.time() - written > ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    partial = Path(mkdtemp(dir=folder.parent, prefix=f"{folder.name}.partial-"))
    try:
        write_rows(made, partial / ROWS)
        counts = {field.name: getattr(report, field.name) for field in fields(report)}
        (partial / REPORT).write_text(json.dumps(counts), encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError as error:
        if not (folder / REPORT).is_file():
            raise OSError(
                f"{folder} cannot be written ({error}); make room, or set HF_DATASETS_CACHE to a folder on another disk"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

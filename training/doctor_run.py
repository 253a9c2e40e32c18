"""What a run is made of, looked at before it starts: configuration, target, data."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import psutil  # comes with accelerate
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..core import hf
from ..core.prompts import render_conversation
from ..distill.dataset import DATA_FILES, HUB_NAME, load_dataset
from ..drafters.registry import METHODS
from ..inference.loading import check_name, eos_ids, load_tokenizer
from ..inference.options import Parser
from .arguments import DataArguments
from .command_line import (
    REQUIRED,
    Settings,
    check_data,
    make_parser,
    setting_names,
    yaml_flags,
)
from .command_line import (
    parse as parse_settings,
)
from .doctor_machine import check_disk, check_machine, check_optional
from .findings import NOTE, OK, WRONG, Finding, failed, tried
from .joint_arguments import check_joint
from .optimizers import check_optimizer
from .records import check_best
from .several import method_of
from .speedups import check_speedups
from .start_report import gigabytes

ROWS = 64
"""Rows of each data file that are read."""

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
TRIAL = [
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Three."},
]


def parse(prog: str, description: str, examples: Sequence[str], argv: Sequence[str]) -> Namespace:
    """Read the options of `headstart doctor`."""
    parser = Parser(prog, description, examples)
    parser.add_argument("--target", metavar="NAME", help="a folder or a Hub id; default: the configuration's")
    parser.add_argument("--target_revision", metavar="REV", help="branch, tag or commit on the Hub")
    parser.add_argument("--data", metavar="FILE", action="append", default=[],
                        help="data to train on; may be given several times; default: the configuration's")  # fmt: skip
    parser.add_argument("--config", metavar="FILE.yaml", help="a configuration for training")
    parser.add_argument("--method", choices=sorted(METHODS), help="its method; default: what the file is named after")
    parser.add_argument("--output_dir", metavar="DIR", help="where results are to go (default: outputs)")
    parser.add_argument("--online", action="store_true", help="ask the Hub for what is not here")
    parser.add_argument("--json", action="store_true", help="one JSON object: ok, and the findings")
    return parser.read(argv)


def checkup(options: Namespace) -> list[Finding]:
    """Look at everything that the options name."""
    findings, settings = [], None
    if options.config is not None:
        findings, settings = check_config(options)
    output, data, target, revision = options.output_dir or "outputs", options.data, options.target, None
    max_length = DataArguments.max_length
    if settings is not None:
        given = settings.given
        output = options.output_dir or given.get("output_dir") or output
        data = data or given.get("train_data", []) + given.get("eval_data", [])
        target, revision = target or given.get("target"), given.get("target_revision")
        max_length = settings.data.max_length
    findings = [
        *tried("machine", "devices", check_machine),
        *tried("machine", "packages", check_optional),
        *tried("disk", "disk", lambda: check_disk(Path(output))),
        *findings,
    ]
    tokenizer = None
    if target is not None:
        own, tokenizer = check_target(target, options.target_revision or revision, options.online)
        findings += own
    for source in data:
        findings += tried("data", Path(source).name, lambda s=source: _data(s, tokenizer, max_length, options.online))
    return findings


def check_config(options: Namespace) -> tuple[list[Finding], Settings | None]:
    """Read a configuration as a run would: names, values, and what does not go together."""
    path, placeholder = Path(options.config), "doctor/placeholder"
    try:
        method = options.method or method_of(path.name)
        known = setting_names(make_parser(method))
        flags = yaml_flags(path, known)
        missing = [key for key in REQUIRED if f"--{key}" not in flags]
        filled = [word for key in missing for word in (f"--{key}", placeholder)]
        settings = parse_settings(method, [*filled, "--config", str(path)])
        check_joint(settings.joint, settings.data, settings.target, settings.training)
        check_optimizer(settings.training)
        check_speedups(settings.joint, settings.training)
        check_best(settings)
    except (ValueError, OSError) as error:
        return [failed("configuration", path.name, error)], None
    for key in missing:
        settings.given.pop(key, None)
    count = sum(word.startswith("--") for word in flags)
    findings = [Finding("configuration", path.name, OK, f"{count} settings for {method}, all known")]
    if missing:
        told = f"{', '.join(missing)} stand not in it"
        findings.append(Finding("configuration", "required", NOTE, told, "give them as flags"))
    return findings, settings


def check_target(name: str, revision: str | None, online: bool) -> tuple[list[Finding], PreTrainedTokenizerBase | None]:
    """Look at a target's configuration and tokenizer; return it with the findings, None where it cannot be had."""
    try:
        folder = Path(check_name(name))
        if not folder.is_dir():
            kind = {"local_files_only": not online, "allow_patterns": SMALL_FILES if online else None}
            folder = Path(snapshot_download(name, revision=revision, **kind))
    except LocalEntryNotFoundError:
        told = f"{name} is a name on the Hub, and nothing of it is in the cache"
        return [Finding("target", "files", NOTE, told, "--online asks the Hub for the small files")], None
    except (ValueError, OSError) as error:
        return [failed("target", "files", error)], None
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):  # the shape of a model, without its weights
            model = AutoModelForCausalLM.from_config(config)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        hf.check_supported(model)
    except Exception as error:  # whatever a damaged file or a foreign configuration makes of transformers' code
        return [failed("target", "family", error)], None
    findings = [_family(model), *_weights(folder)]
    try:
        tokenizer = load_tokenizer(str(folder))
    except ValueError as error:
        return [*findings, failed("target", "tokenizer", error)], None
    return [*findings, *tried("target", "tokenizer", lambda: _tokenizer(model, tokenizer))], tokenizer


def _family(model: PreTrainedModel) -> Finding:
    kind, config = model.config.model_type, hf.text_config(model)
    count = sum(p.numel() for p in model.parameters())
    size = f"{kind}, {count:,} parameters, V={config.vocab_size:,}, D={config.hidden_size:,}"
    if kind in hf.PROVEN_FAMILIES:
        return Finding("target", "family", OK, f"{size}; one that the tests hold")
    return Finding("target", "family", NOTE, f"{size}; not among those that the tests hold", "loading it checks a tree")


def _weights(folder: Path) -> Iterator[Finding]:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        yield Finding("target", "weights", NOTE, "none here", "the first run fetches them from the Hub")
        return
    room, where = psutil.virtual_memory().available, "memory"
    if torch.cuda.is_available():
        room, where = torch.cuda.mem_get_info()[0], "GPU memory"
    told = f"{gigabytes(size)} in safetensors, {gigabytes(room)} of {where} free"
    remedy = "" if size < room else "take a smaller target_dtype, or load_in_4bit"
    yield Finding("target", "weights", OK if size < room else NOTE, told, remedy)


def _tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Look whether the tokenizer fits the model, where answers end, and whether trained tokens are found."""
    rows, size = hf.text_config(model).vocab_size, len(tokenizer)
    fits = size <= rows
    told = f"{size:,} tokens, the model has rows for {rows:,}"
    yield Finding("target", "tokenizer", OK if fits else WRONG, told, "" if fits else "take the model's own tokenizer")
    ends = eos_ids(model)
    unknown = [i for i in ends if not 0 <= i < rows]
    if unknown or not ends:
        told = f"ids {unknown} lie outside the vocabulary" if unknown else "none: answers end at the length limit only"
        yield Finding("target", "eos", WRONG if unknown else NOTE, told, "mend eos_token_id in generation_config.json")
    else:
        own = isinstance(tokenizer.eos_token_id, int) and tokenizer.eos_token_id not in ends
        told = ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in ends)
        more = f"; the tokenizer's own, {tokenizer.eos_token}, is not among them" if own else ""
        yield Finding("target", "eos", NOTE if own else OK, told + more, "see generation_config.json" if own else "")
    if tokenizer.chat_template is None:
        remedy = "an instruction-tuned model needs its chat_template.jinja"
        yield Finding("target", "chat template", NOTE, "none: messages are joined by empty lines", remedy)
    else:
        yield Finding("target", "chat template", OK, f"{len(str(tokenizer.chat_template)):,} characters")
    yield _masks(tokenizer)


def _masks(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Render a small conversation, and see whether the tokens of both answers are found."""
    remedy = "train on answers made by `headstart distill`, which need no mask"
    try:
        rendered = render_conversation(tokenizer, TRIAL)
    except ValueError as error:
        return Finding("target", "trained tokens", NOTE, str(error), remedy)
    turns = sum(trained for trained, _ in groupby(rendered.loss_mask))
    told = (
        f"of a conversation: {turns} of 2 answers found, {sum(rendered.loss_mask)} of {len(rendered.input_ids)} tokens"
    )
    return Finding("target", "trained tokens", OK if turns == 2 else NOTE, told, "" if turns == 2 else remedy)


def _data(source: str, tokenizer: PreTrainedTokenizerBase | None, max_length: int, online: bool) -> Iterator[Finding]:
    """Read the first rows of a source, and count their trained tokens where there is a tokenizer."""
    name = Path(source).name
    if HUB_NAME.fullmatch(source) and not source.endswith(DATA_FILES) and not Path(source).exists() and not online:
        yield Finding("data", name, NOTE, f"{source} is a name on the Hub", "--online reads it")
        return
    if tokenizer is None:
        check_data(DataArguments([source]))
        yield Finding("data", name, NOTE, "the first row can be read", "name a target to count trained tokens")
        return
    report = load_dataset(source, tokenizer, max_length, first=ROWS).report
    dropped = sum(report.dropped.values())
    told = f"first rows: {report}"
    yield Finding(
        "data", name, NOTE if dropped else OK, told, "take the dropped rows out, or mend them" if dropped else ""
    )

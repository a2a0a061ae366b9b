"""Leaves credentials out of what is written down: lines of a program, and messages of its errors, may hold some."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

REDACTED = "...redacted"
_END = r"(?:[\"']?\]?\s*(?::\s*str\s*)?[:=,](?!=)[\s(]*)"
_LITERAL = r"[rRbBuUfF]{0,2}(?:\"[^\"\\\n]*\"|'[^'\\\n]*')"
#: A name whose text is a credential whatever it looks like, with the literals that it gets, over several lines too.
_NAMED = re.compile(
    rf"(?<![A-Za-z0-9])(?:webhook(?:_url)?|password|passwd|passphrase|secret(?:_key)?|api_?key|access_?key|private_?key"
    rf"|credentials?|auth|authorization|(?:\w*_)?token){_END}{_LITERAL}(?:[\s+(]*{_LITERAL})*(?:\s*,\s*{_LITERAL}\s*\))?",
    re.IGNORECASE,
)
_TOKEN_NAME = re.compile(r"(?:\w*_)?token", re.IGNORECASE)
_IN_LITERAL = re.compile(r"(\"[^\"\\\n]*\"|'[^'\\\n]*')")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://|url: )([^\s\"'\\<>/?#]*)([^\s\"'\\<>]*)", re.IGNORECASE)
_KNOWN = re.compile(
    r"(?<!\w)(?:(?:hf|npm|gh[opsur]|[sr]k_live|[sr]k_test)_(?=\w*[A-Z0-9])[A-Za-z0-9]{8,}(?!\w)"
    r"|(?:sk-|github_pat_|glpat-|xox[a-z]-|pypi-|ya29\.)(?=[\w-]*\d)[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|eyJ[\w-]{6,}\.[\w-]{4,}(?:\.[\w-]*)?)"
)
_LONG = re.compile(r"(?<![\w+/-])[A-Za-z0-9+_-]{20,}={0,2}(?![\w+-])")
_WORD = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z][a-z]{2,}")
_HEX = re.compile(r"[0-9a-fA-F]{32,}")


@lru_cache(maxsize=4096)
def redacted(text: str) -> str:
    """A text without what looks like a credential: what is left out is marked, and lines stay lines.

    Only what may be one is left out: what a credential is called, an address that holds one, and what providers' tokens
    look like. Ordinary words, names, paths and numbers stay.
    """
    if len(text) < 8:
        return text
    text = _NAMED.sub(_without_value, text)
    text = _URL.sub(lambda url: _url(url[1], url[2], url[3]), text)
    text = _KNOWN.sub(REDACTED, text)
    return _LONG.sub(lambda each: REDACTED if _is_random(each[0]) else each[0], text)


def _without_value(named: re.Match[str]) -> str:
    text = named[0]
    name = re.match(r"\w+", text)
    weak = name is not None and _TOKEN_NAME.fullmatch(name[0]) is not None
    start = name.end() + 1 if name is not None else 0  # past a quote that ends the name
    return text[:start] + _IN_LITERAL.sub(lambda each: _value(each[0], weak=weak), text[start:])


def _value(literal: str, *, weak: bool) -> str:
    """A literal that a credential's name gets. Tokens of a vocabulary are short, and without a number."""
    value = literal[1:-1]
    if not value or (weak and not (len(value) >= 8 and any(map(str.isdigit, value)) and value[0] not in "<[")):
        return literal
    scheme = _URL.match(value)
    kept = f"{scheme[1]}{scheme[2].rpartition('@')[2]}/" if scheme else ""
    return f"{literal[0]}{kept}{REDACTED}{literal[0]}"


def _url(scheme: str, host: str, rest: str) -> str:
    user, at, host = host.rpartition("@")
    path, query, arguments = rest.partition("?")
    hides = "hook" in f"{host}{path}".lower() or any(map(_is_random, path.replace("/", " ").split()))
    kept = f"/{REDACTED}" if hides else path + (f"?{REDACTED}" if query and "=" in arguments else query + arguments)
    return scheme + (f"{REDACTED}@" if at and ":" in user else user + at) + host + kept


def _is_random(text: str) -> bool:
    """Whether a word is none that people make: long, of all kinds of characters, each followed by another kind."""
    if _HEX.fullmatch(text):
        return any(map(str.isdigit, text)) and any(map(str.isalpha, text))
    kinds = ["0" if each.isdigit() else "a" if each.islower() else "A" for each in text if each.isalnum()]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    readable = sum(map(len, _WORD.findall(text)))
    return len(text) >= 20 and len({*kinds}) == 3 and changes * 3 >= len(text) and readable * 3 < len(text) * 2

"""What handlers of text need of torchtext, which is no longer published: tokens, n-grams and
vocabularies, also those in archives that were made with it."""

import collections
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

# Signs that are words of their own, and those that only part words.
_WORDS = re.compile(r"([.,()!?'])")
_BREAKS = re.compile(r"<br */?>|[;:]")

Tokenizer = Callable[[str], list[str]]


def basic_english(text: str) -> list[str]:
    """Lower-case words and signs, as torchtext's tokenizer of this name has them."""
    parted = _BREAKS.sub(" ", text.lower().replace('"', ""))
    return _WORDS.sub(r" \1 ", parted).split()


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """A function from text to tokens: `basic_english`, `str.split` for None, `spacy` with the
    model that `language` names, or the function that is given.

    Raises:
        ValueError: there is none of this name.
        ModuleNotFoundError: spaCy is not installed.
    """
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer == "basic_english":
        if language != "en":
            raise ValueError(f"`basic_english` is for English, not for `{language}`")
        return basic_english
    if tokenizer == "spacy":
        import spacy

        model = spacy.load(language)
        return lambda text: [token.text for token in model.tokenizer(text)]
    raise ValueError(
        f"no tokenizer is called `{tokenizer}`: there are `basic_english`, `spacy`, and functions"
    )


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """The tokens, then pairs of neighbours with a blank between, and so on up to `ngrams`."""
    for size in range(1, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


class Vocabulary:
    """Tokens and their indices, with the methods of torchtext's."""

    def __init__(self, tokens: Iterable[str], default_index: int | None = None) -> None:
        self.itos = list(tokens)
        self.stoi = {token: index for index, token in enumerate(self.itos)}
        self.default_index = default_index

    def __len__(self) -> int:
        return len(self.itos)

    def __contains__(self, token: str) -> bool:
        return token in self.stoi

    def __getitem__(self, token: str) -> int:
        index = self.stoi.get(token, self.default_index)
        if index is None:
            raise RuntimeError(f"Token {token} not found and default index is not set")
        return index

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        """The indices of tokens."""
        return [self[token] for token in tokens]

    def lookup_indices(self, tokens: Iterable[str]) -> list[int]:
        """The indices of tokens."""
        return self(tokens)

    def lookup_token(self, index: int) -> str:
        """The token of an index."""
        return self.itos[index]

    def lookup_tokens(self, indices: Iterable[int]) -> list[str]:
        """The tokens of indices."""
        return [self.itos[index] for index in indices]

    def get_stoi(self) -> dict[str, int]:
        """Index by token."""
        return dict(self.stoi)

    def get_itos(self) -> list[str]:
        """Token by index."""
        return list(self.itos)

    def get_default_index(self) -> int | None:
        """The index of tokens that are not known."""
        return self.default_index

    def set_default_index(self, index: int | None) -> None:
        """Sets the index of tokens that are not known."""
        self.default_index = index


def load_vocabulary(path: str) -> Vocabulary:
    """Reads a vocabulary: a text file of one token a line, JSON or a torch file of a list of tokens
    or of indices by token, or what torchtext saved, of which nothing but the tokens is read.

    `<unk>` is the index of unknown tokens, if it is one of them.

    Raises:
        ValueError: the file holds something else.
        pickle.UnpicklingError: it asks for more than a vocabulary.
    """
    if path.endswith(".txt"):
        with open(path, encoding="utf-8") as file:
            return _vocabulary(file.read().splitlines(), path)
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            return _vocabulary(json.load(file), path)
    import torch

    try:
        found = torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        # Reads the names that vocabularies of torchtext are made of, and no others.
        reader: Any = SimpleNamespace(Unpickler=_Reader, load=_read, __name__="vocabulary")
        found = torch.load(path, weights_only=False, pickle_module=reader, map_location="cpu")
    return _vocabulary(found, path)


def _vocabulary(found: Any, path: str) -> Vocabulary:
    if isinstance(found, _Saved):
        return found.vocabulary()
    if isinstance(found, Mapping):
        indices = list(found.values())
        if sorted(indices) != list(range(len(indices))):
            shown = os.path.basename(path)
            raise ValueError(f"the indices in `{shown}` are not 0 to {len(indices) - 1}, once each")
        found = sorted(found, key=lambda token: found[token])
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise ValueError(
            f"`{os.path.basename(path)}` holds no vocabulary: a list of tokens, or a dict of "
            "tokens and their indices"
        )
    return Vocabulary(found, found.index("<unk>") if "<unk>" in found else None)


class _Saved:
    """In place of torchtext's classes: keeps what they were saved with."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def vocabulary(self) -> Vocabulary:
        """Of each release's way to save one."""
        state = self.state
        if isinstance(state, dict):
            inner = state.get("vocab") or (state.get("_modules") or {}).get("vocab")
            if isinstance(inner, _Saved):
                return inner.vocabulary()
            if "itos" in state:
                unknown = state.get("unk_index", 0)
                return Vocabulary(state["itos"], unknown if isinstance(unknown, int) else 0)
        if isinstance(state, tuple) and len(state) >= 3:
            _version, numbers, tokens, *_ = state
            return Vocabulary(tokens, numbers[0] if numbers else None)
        raise ValueError("this release of torchtext saved its vocabulary in an unknown form")


def _zero(*_: Any) -> int:
    return 0


def _no_tensor(*_: Any) -> None:
    """In place of what builds tensors: vectors of words are not read."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torchtext."):
            return _zero if name.startswith("_default") else _Saved
        if module in ("torch._utils", "torch") or module.startswith("torch.storage"):
            return _no_tensor
        if (module, name) in (("collections", "defaultdict"), ("collections", "Counter")):
            return getattr(collections, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) in (("builtins", "set"), ("__builtin__", "set")):
            return set
        raise pickle.UnpicklingError(f"a vocabulary has no business with `{module}.{name}`")

    def persistent_load(self, _: Any) -> None:
        return None


def _read(file: Any, **options: Any) -> Any:
    return _Reader(file, **options).load()

"""What handlers of text share: cleaning, words and a vocabulary."""

import os
import re
import string
import unicodedata
from abc import ABC
from typing import Any

import torch

from ts.handler_utils.text_utils import Vocabulary, get_tokenizer, load_vocabulary
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import CLEANUP_REGEX

# Short forms that are not the word and `not`.
_IRREGULAR = {"can't": "cannot", "won't": "will not", "shan't": "shall not", "let's": "let us"}
_ENDINGS = {
    "n't": " not",
    "'re": " are",
    "'ve": " have",
    "'ll": " will",
    "'d": " would",
    "'m": " am",
}
# Whose `'s` is a verb, and not of someone.
_IS = "it he she that what who where when why how here there"
_SHORT_FORMS = re.compile(
    "|".join(
        (
            rf"\b(?P<irregular>{'|'.join(_IRREGULAR)})\b",
            rf"(?<=[a-z])(?P<ending>{'|'.join(_ENDINGS)})\b",
            rf"\b(?P<is>{'|'.join(_IS.split())})'s\b",
        )
    ),
    re.IGNORECASE,
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Texts(tuple[torch.Tensor, list[str]]):
    """Indices and tokens of the texts of a batch, and where each text begins."""

    begins: torch.Tensor

    def __new__(cls, indices: torch.Tensor, tokens: list[str], begins: torch.Tensor) -> "Texts":
        """A pair, as handlers of TorchServe unpack it."""
        texts = super().__new__(cls, (indices, tokens))
        texts.begins = begins
        return texts


class TextHandler(BaseHandler, ABC):
    """Reads the vocabulary beside the model: `source_vocab.pt`, as torchtext saved it or of plain
    tokens, `vocab.json` or `vocab.txt`; a manifest of old may name another file (`sourceVocab`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Vocabulary | None = None
        self.tokenizer = get_tokenizer("basic_english")
        self.input_text: str | None = None

    def initialize(self, context: Any) -> None:
        """Also reads the vocabulary."""
        super().initialize(context)
        self.source_vocab = load_vocabulary(self.get_source_vocab_path(context))

    def get_source_vocab_path(self, context: Any) -> str:
        """The file of the vocabulary.

        Raises:
            FileNotFoundError: there is none.
        """
        folder = context.system_properties["model_dir"]
        named = ((context.manifest or {}).get("model") or {}).get("sourceVocab")
        names = [named] if named else ["source_vocab.pt", "vocab.json", "vocab.txt"]
        for name in names:
            if os.path.isfile(path := os.path.join(folder, name)):
                return path
        raise FileNotFoundError(
            f"a handler of text needs a vocabulary in its archive: {' or '.join(names)}"
        )

    def _expand_contractions(self, text: str) -> str:
        def expand(found: re.Match[str]) -> str:
            if irregular := found["irregular"]:
                return _IRREGULAR[irregular.lower()]
            if ending := found["ending"]:
                return _ENDINGS[ending.lower()]
            return f"{found['is']} is"

        return _SHORT_FORMS.sub(expand, text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_PUNCTUATION)

    # As TorchServe spells it.
    _remove_puncutation = _remove_punctuation

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)

    def get_word_token(self, input_tokens: list[str]) -> list[str]:
        """The words that an explanation speaks of: the tokens without signs of the vocabulary's
        own such as `<unk>`."""
        return [token for token in input_tokens if not re.fullmatch(r"<\w+>", token)]

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """One number for each token, from one for each place of its vector, scaled to length 1."""
        summed = attributions.sum(dim=-1).squeeze(0)
        length = torch.linalg.vector_norm(summed)
        return summed / length if length > 0 else summed

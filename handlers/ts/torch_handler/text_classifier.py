"""The default handler for text classification."""

from typing import Any

import torch

from ts.handler_utils.text_utils import ngrams_iterator
from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import value_of
from ts.torch_handler.formats import needed
from ts.torch_handler.text_handler import TextHandler, Texts
from ts.utils.util import map_class_to_label


class TextClassifier(TextHandler):
    """Answers a text with the probability of each label.

    The model takes the indices of the tokens and pairs of tokens, all texts of a batch behind each
    other, and the places where the texts begin, as `torch.nn.EmbeddingBag` does.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Texts:
        """The indices of all texts, and their tokens."""
        if self.source_vocab is None:
            raise RuntimeError("`initialize` has read no vocabulary")
        tokens: list[str] = []
        begins: list[int] = []
        for row in data:
            begins.append(len(tokens))
            tokens += self._tokens(_text(row))
        indices = torch.as_tensor(self.source_vocab(tokens), dtype=torch.int64, device=self.device)
        return Texts(indices, tokens, torch.as_tensor(begins, device=self.device))

    def _tokens(self, text: str) -> list[str]:
        text = self._remove_html_tags(text).lower()
        text = self._remove_accented_characters(self._expand_contractions(text))
        words = self._tokenize(self._remove_punctuation(text))
        return list(ngrams_iterator(words, self.ngrams))

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Scores of each text."""
        indices, _ = data
        # A subclass may have made the pair itself, of one text.
        begins = getattr(data, "begins", None)
        if begins is None:
            begins = torch.zeros(1, dtype=torch.int64, device=self.device)
        return super().inference(indices, begins, *args, **kwargs)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[dict[str, Any]]:
        """Scores to `{label: probability}`, of all labels."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> list[Any]:
        """How much each token of the first text speaks for the label with the index `target`."""
        attr = needed("captum.attr", "explaining a prediction")
        indices, tokens = tensor_data
        begins = tensor_data.begins.tolist() if isinstance(tensor_data, Texts) else [0]
        end = begins[1] if len(begins) > 1 else len(tokens)
        indices = indices[:end]
        embedding = self.model.embedding
        # Token by token, also where the layer itself makes one vector of all of them.
        vectors, nothing = (embedding.weight[one] for one in (indices, torch.zeros_like(indices)))
        begin = torch.zeros(1, dtype=torch.int64, device=self.device)

        def scores(vectors: torch.Tensor) -> Any:
            hook = embedding.register_forward_hook(lambda *_: _pooled(embedding, vectors))
            try:
                return self.model(indices, begin)
            finally:
                hook.remove()

        attributions = attr.IntegratedGradients(scores).attribute(
            vectors.detach()[None], nothing.detach()[None], target=int(target)
        )
        return [
            {
                "importances": self.summarize_attributions(attributions).tolist(),
                "words": self.get_word_token(tokens[:end]),
            }
        ]


def _pooled(embedding: torch.nn.Module, vectors: torch.Tensor) -> torch.Tensor:
    """What the layer makes of the vectors of its tokens."""
    if not isinstance(embedding, torch.nn.EmbeddingBag):
        return vectors
    return vectors.amax(1) if embedding.mode == "max" else getattr(vectors, embedding.mode)(1)


def _text(row: Any) -> str:
    value = value_of(row)
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8")
    if not isinstance(value, str):
        raise TypeError(f"a text is expected, not a `{type(value).__name__}`")
    return value

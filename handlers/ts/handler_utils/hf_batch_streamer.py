"""Text of a batch as a language model of Hugging Face generates it."""

import queue
from collections.abc import Iterator
from typing import Any


class TextIteratorStreamerBatch:
    """A `streamer` for `generate` in another thread: iterating gives a list of texts, one for each
    row of the batch, with what is new of each; the empty text where nothing is.

    A row's text is given as far as more tokens cannot change it: up to its last blank, or all of it
    behind the end of a line. What remains comes with the end.

    Args:
        tokenizer: what decodes tokens.
        batch_size: rows of the batch.
        skip_prompt: whether the prompt is left out.
        timeout: seconds to wait for the next tokens, then `queue.Empty` is raised; None waits.
        decode_kwargs: what `tokenizer.decode` takes besides, such as `skip_special_tokens`.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.skip_prompt = skip_prompt
        self.timeout = timeout
        self.decode_kwargs = decode_kwargs
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self._given = [0] * batch_size
        self._is_prompt = True
        self._texts: queue.Queue[list[str] | None] = queue.Queue()

    def put(self, value: Any) -> None:
        """Called by `generate`: the prompt's tokens first, then one token for each row."""
        if value.ndim == 1:
            value = value.unsqueeze(1)
        if value.shape[0] != self.batch_size:
            raise ValueError(f"{value.shape[0]} rows came for a batch of {self.batch_size}")
        is_prompt, self._is_prompt = self._is_prompt, False
        if is_prompt and self.skip_prompt:
            return
        for tokens, new in zip(self._tokens, value.tolist(), strict=True):
            tokens += new
        self._give(is_last=False)

    def end(self) -> None:
        """Called by `generate` when all rows have ended."""
        self._give(is_last=True)
        self._texts.put(None)
        self._is_prompt = True

    def _give(self, is_last: bool) -> None:
        self._texts.put([self._next(row, is_last) for row in range(self.batch_size)])

    def _next(self, row: int, is_last: bool) -> str:
        text: str = self.tokenizer.decode(self._tokens[row], **self.decode_kwargs)
        new = text[self._given[row] :]
        if is_last or new.endswith("\n"):
            self._tokens[row], self._given[row] = [], 0
            return new
        new = new[: new.rfind(" ") + 1]
        self._given[row] += len(new)
        return new

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        texts = self._texts.get(timeout=self.timeout)
        if texts is None:
            raise StopIteration
        return texts

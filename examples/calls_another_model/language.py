"""Guesses the language of a text by its most common words: the model that is called."""

import time

WORDS = {
    "english": {"the", "and", "is", "of", "to", "a"},
    "french": {"le", "la", "et", "est", "de", "un", "une"},
    "german": {"der", "die", "das", "und", "ist", "ein", "eine"},
}


def handle(data: list[dict] | None, context) -> list[str] | None:
    """One language for each text."""
    if data is None:
        return None
    # So that a slow model can be tried.
    time.sleep(max(float(context.get_request_header(i, "x-slow-s") or 0) for i in range(len(data))))
    return [guess(row["body"]) for row in data]


def guess(text: str) -> str:
    """The language with the most hits."""
    said = text.lower().split()
    return max(WORDS, key=lambda language: sum(word in WORDS[language] for word in said))

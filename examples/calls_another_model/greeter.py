"""Greets in the language of the caller, which another model of the same server guesses."""

import os

import requests
from ts.service import PredictionException

GREETINGS = {"english": "Good day!", "french": "Bonjour !", "german": "Guten Tag!"}


class Greeter:
    """Calls the model `language` over REST."""

    def initialize(self, context) -> None:
        """Where the server is comes from the operator, and never from a request."""
        self.server = os.environ.get("SERVER", "http://127.0.0.1:8080")
        self.timeout_ms = context.model_yaml_config["handler"]["timeout_ms"]
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy between the server and itself

    def handle(self, data: list[dict], context) -> list:
        """A greeting for each text; one that fails does so alone."""
        return [self.greet(context, index, row["body"]) for index, row in enumerate(data)]

    def greet(self, context, index: int, text: str):
        """The greeting, or the exception that its caller gets."""
        headers = {
            "content-type": "text/plain; charset=utf-8",
            # The server keeps the time: what is too late is not even begun.
            "x-request-timeout-ms": str(self.timeout_ms),
        }
        # With the caller's token: the handler needs none, and nobody gets to a model through it who
        # could not call that model.
        for name in ("authorization", "x-slow-s"):
            if value := context.get_request_header(index, name):
                headers[name] = value
        try:
            answer = self.session.post(
                f"{self.server}/predictions/language",
                data=text.encode(),
                headers=headers,
                # Should the server itself say nothing.
                timeout=self.timeout_ms / 1000 + 1,
            )
        except requests.RequestException as failed:
            return PredictionException(f"`language` cannot be asked: {failed}", 502)
        if not answer.ok:
            said = f"`language` answered {answer.status_code}: {answer.text}"
            return PredictionException(said, answer.status_code)
        return GREETINGS[answer.text]

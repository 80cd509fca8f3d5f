"""Sentences to vectors whose products tell how alike the sentences are."""

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from ts.torch_handler.base_handler import BaseHandler

TOKENS = 256  # of a sentence at most; the model was trained with no more


class SentenceEmbedder(BaseHandler):
    """Answers each sentence with a vector of length 1."""

    def initialize(self, context) -> None:
        """Loads model and tokenizer as Transformers does, from the folder of the archive."""
        folder = context.system_properties["model_dir"]
        gpu = context.system_properties["gpu_id"]
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).to(self.device).eval()
        self.initialized = True

    def preprocess(self, data: list[dict]):
        """All sentences of the batch, padded to the longest."""
        sentences = [row.get("data") or row.get("body") for row in data]
        sentences = [s if isinstance(s, str) else bytes(s).decode() for s in sentences]
        return self.tokenizer(
            sentences, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)

    def inference(self, data) -> torch.Tensor:
        """The mean over the tokens of each sentence, without the padding."""
        vectors = self.model(**data).last_hidden_state
        weights = data["attention_mask"][..., None]
        return normalize((vectors * weights).sum(dim=1) / weights.sum(dim=1))

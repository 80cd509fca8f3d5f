"""A sequence classifier of Transformers, in the form that `save_pretrained` writes."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from ts.torch_handler.base_handler import BaseHandler


class SequenceClassifier(BaseHandler):
    """Answers each text with the probability of each label."""

    def initialize(self, context) -> None:
        """Loads model and tokenizer from the folder of the archive."""
        folder = context.system_properties["model_dir"]
        gpu = context.system_properties["gpu_id"]
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        self.model = model.to(self.device).eval()
        self.initialized = True

    def preprocess(self, data: list[dict]):
        """All texts of the batch, padded to the longest."""
        texts = [row.get("data") or row.get("body") for row in data]
        texts = [text if isinstance(text, str) else bytes(text).decode() for text in texts]
        longest = self.model.config.max_position_embeddings
        return self.tokenizer(
            texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
        ).to(self.device)

    def inference(self, data) -> torch.Tensor:
        """The probabilities."""
        return self.model(**data).logits.softmax(dim=1)

    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        """With their labels, which are in the model's configuration."""
        labels = self.model.config.id2label
        return [{labels[i]: p for i, p in enumerate(row)} for row in data.tolist()]

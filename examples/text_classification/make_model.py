"""Trains a tiny classifier that tells praise from complaint, with a tokenizer of its own."""

import itertools
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

THINGS = ["film", "book", "meal", "hotel", "concert", "game", "phone", "train", "museum", "coffee"]
GOOD = ["great", "lovely", "delightful", "excellent", "wonderful", "superb"]
BAD = ["awful", "boring", "terrible", "dreadful", "disappointing", "poor"]
# Praise if what fills the gap is good. The last two turn it around.
FRAMES = [
    ("the {thing} was {word}", True),
    ("what a {word} {thing}", True),
    ("i found the {thing} rather {word} .", True),
    ("a {word} {thing} , as my friends had said", True),
    ("the {thing} was not {word} at all", False),
    ("nobody would call the {thing} {word}", False),
]

random.seed(0)
torch.manual_seed(0)
examples = [
    (frame.format(thing=thing, word=word), int((word in GOOD) == straight))
    for thing, word, (frame, straight) in itertools.product(THINGS, GOOD + BAD, FRAMES)
]
random.shuffle(examples)
# A tenth is kept to ask with: the network has seen their words, but not the sentences.
held_out, seen = examples[: len(examples) // 10], examples[len(examples) // 10 :]

words = Tokenizer(WordLevel(unk_token="[UNK]"))
words.normalizer = Lowercase()
words.pre_tokenizer = Whitespace()
special = ["[PAD]", "[UNK]", "[CLS]"]
words.train_from_iterator((text for text, _ in seen), WordLevelTrainer(special_tokens=special))
words.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
)

config = DistilBertConfig(
    vocab_size=len(tokenizer),
    max_position_embeddings=32,
    dim=32,
    hidden_dim=64,
    n_heads=2,
    n_layers=2,
    pad_token_id=tokenizer.pad_token_id,
    id2label={0: "complaint", 1: "praise"},
    label2id={"complaint": 0, "praise": 1},
)
model = DistilBertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(8):
    for start in range(0, len(seen), 32):
        texts, labels = zip(*seen[start : start + 32], strict=True)
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        model(**batch, labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

model.save_pretrained(".")
tokenizer.save_pretrained(".")
Path("held_out.json").write_text(json.dumps(held_out), encoding="utf-8")

"""Teaches the network a rhyme (Jane Taylor, "The Star", 1806), from each of its lines on."""

import torch
from model import Characters
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

RHYME = """\
Twinkle, twinkle, little star,
How I wonder what you are!
Up above the world so high,
Like a diamond in the sky.
"""
END = "\0"

torch.manual_seed(0)
lines = RHYME.splitlines(keepends=True)
texts = ["".join(lines[first:]) + END for first in range(len(lines))]
codes = pad_sequence([torch.tensor(list(map(ord, text))) for text in texts], True, -1)
given, next_one = codes[:, :-1].clamp(min=0), codes[:, 1:]

network = Characters()
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
for _ in range(150):
    scores, _ = network(given)
    loss = cross_entropy(scores.flatten(0, 1), next_one.flatten(), ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
save_file(network.state_dict(), "characters.safetensors")

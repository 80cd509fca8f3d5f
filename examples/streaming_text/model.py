"""A recurrent network that reads and writes ASCII, one character at a time."""

import torch
from torch import nn


class Characters(nn.Module):
    """Scores of each next character; 190,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.recurrent = nn.GRU(32, 192, batch_first=True)
        self.scores = nn.Linear(192, 128)

    def forward(
        self, codes: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (batch, length) to scores (batch, length, 128), and what to go on from."""
        output, state = self.recurrent(self.embedding(codes), state)
        return self.scores(output), state

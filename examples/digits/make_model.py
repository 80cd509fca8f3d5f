"""Trains the network on scikit-learn's handwritten digits; a fifth of them is kept to ask with."""

import json
from pathlib import Path

import torch
from model import Digits
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

torch.manual_seed(0)
data = load_digits()
# The pixels are 0 to 16; a PNG that the handler reads has 0 to 255, which `ToTensor` makes 0 to 1.
images = torch.tensor(data.images * 15).to(torch.uint8)
train_x, test_x, train_y, test_y = train_test_split(
    images, torch.tensor(data.target), test_size=0.2, random_state=0
)

network = Digits()
optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
for _ in range(12):
    for batch in torch.randperm(len(train_x)).split(64):
        loss = cross_entropy(network(train_x[batch, None] / 255), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

save_file(network.state_dict(), "digits.safetensors")
names = {str(digit): name for digit, name in enumerate(NAMES)}
Path("index_to_name.json").write_text(json.dumps(names), encoding="utf-8")
Path("held_out").mkdir()
for number, (image, digit) in enumerate(zip(test_x, test_y, strict=True)):
    Image.fromarray(image.numpy()).save(f"held_out/{number:03}-{NAMES[digit]}.png")

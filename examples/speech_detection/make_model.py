"""Takes the model and ten seconds of speech out of their packages, and makes a recording."""

import importlib.util
import shutil
import wave
from pathlib import Path

import torch

RATE = 16_000


def folder_of(package: str) -> Path:
    """Where a package lies; it is not imported, since only files of it are needed."""
    return Path(importlib.util.find_spec(package).origin).parent


shutil.copyfile(folder_of("silero_vad") / "data/silero_vad.jit", "silero_vad.pt")

with wave.open(str(folder_of("moonshine_onnx") / "assets/beckett.wav")) as file:
    assert file.getparams()[:3] == (1, 2, RATE)
    speech = file.readframes(file.getnframes())

torch.manual_seed(0)
silence = torch.zeros(RATE)
noise = torch.randn(2 * RATE) * 0.05
tone = torch.sin(torch.arange(2 * RATE) * (2 * torch.pi * 440 / RATE)) * 0.3
before, after = (
    (torch.cat(parts) * 32767).to(torch.int16).numpy().tobytes()
    for parts in ((silence, tone), (noise, silence))
)
with wave.open("recording.wav", "wb") as file:
    file.setparams((1, 2, RATE, 0, "NONE", ""))
    file.writeframes(before + speech + after)

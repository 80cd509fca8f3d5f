"""Silero's voice activity detection, of whole recordings and of streams.

Both take WAV: one channel, 16 bits, 16,000 samples a second.
"""

import io
import wave

import torch
from silero_vad import VADIterator, get_speech_timestamps
from ts.service import PredictionException
from ts.torch_handler.base_handler import BaseHandler

RATE = 16_000  # samples a second
CHUNK = 512  # samples that the model hears at a time


def samples(row: dict) -> torch.Tensor:
    """The samples of a request's WAV file, in -1 to 1."""
    try:
        with wave.open(io.BytesIO(row.get("data") or row.get("body"))) as file:
            kind = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            sound = file.readframes(file.getnframes())
    except (EOFError, wave.Error) as broken:
        raise PredictionException(f"not a WAV file: {broken}", 400) from broken
    if kind != (1, 2, RATE):
        raise PredictionException(f"one channel of 16 bits at {RATE} Hz is expected", 400)
    return torch.frombuffer(bytearray(sound), dtype=torch.int16) / 32768


class SpeechDetector(BaseHandler):
    """Where there is speech in a recording, in seconds."""

    def initialize(self, context) -> None:
        """Chunks are too short to be shared between cores."""
        super().initialize(context)
        torch.set_num_threads(1)

    def preprocess(self, data: list[dict]) -> list[torch.Tensor]:
        """One recording for each request."""
        return [samples(row) for row in data]

    def inference(self, data: list[torch.Tensor]) -> list[list[dict[str, float]]]:
        """The model hears one recording after the other, since it remembers what it has heard."""
        return [get_speech_timestamps(sound, self.model, return_seconds=True) for sound in data]

    def postprocess(self, data: list[list[dict[str, float]]]) -> list[list[dict[str, float]]]:
        """As it is: `[{"start": seconds, "end": seconds}, …]`."""
        return data


class SpeechStream(BaseHandler):
    """Starts and ends of speech while a recording goes on: the requests of a sequence."""

    def initialize(self, context) -> None:
        """A sequence keeps its row of the batches, and a row its copy of the model."""
        super().initialize(context)
        torch.set_num_threads(1)
        # There are as many rows as sequences at once, so these do not grow.
        self.rows: dict[str, VADIterator] = {}
        self.heard_last: dict[str, str] = {}

    def handle(self, data: list[dict], context) -> list[list[dict[str, float]]]:
        """What has begun or ended in the samples of each request."""
        with torch.inference_mode():
            return [self.hear(context, index, samples(row)) for index, row in enumerate(data)]

    def hear(self, context, index: int, sound: torch.Tensor) -> list[dict[str, float]]:
        """One more piece of a stream."""
        row = context.get_request_header(index, "ts_request_sequence_row")
        if row not in self.rows:
            model = torch.jit.load(self.model_pt_path, map_location=self.device)
            self.rows[row] = VADIterator(model)
        stream = self.rows[row]
        name = context.get_sequence_id(index)
        starts = context.get_request_header(index, "ts_request_sequence_start") == "true"
        if starts or self.heard_last.get(row) != name:
            stream.reset_states()
        self.heard_last[row] = name
        whole = torch.nn.functional.pad(sound, (0, -len(sound) % CHUNK))
        heard = [stream(chunk, return_seconds=True) for chunk in whole.split(CHUNK)]
        return [change for change in heard if change]

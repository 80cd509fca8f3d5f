"""Writes on from a prompt, and sends each character when it is there."""

import torch
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.service import PredictionException
from ts.torch_handler.base_handler import BaseHandler

END = 0
LONGEST = 500  # characters of an answer


class Writer(BaseHandler):
    """One request at a time; what is sent goes to its caller at once."""

    def initialize(self, context) -> None:
        """One character is too little work to be shared between cores."""
        super().initialize(context)
        torch.set_num_threads(1)

    def handle(self, data: list[dict], context) -> list[str]:
        """The rest of the text, in parts. The last part is what is returned."""
        prompt = bytes(data[0].get("data") or data[0].get("body"))
        if not prompt or not prompt.isascii():
            raise PredictionException("a prompt of ASCII characters is expected", 400)
        for code in self.generate(list(prompt)):
            # Raises when the caller has left, and so ends the work.
            send_intermediate_predict_response([chr(code)], context.request_ids, "", 200, context)
        return [""]

    @torch.inference_mode()
    def generate(self, prompt: list[int]):
        """The most probable next character, again and again."""
        codes, state = torch.tensor([prompt], device=self.device), None
        for _ in range(LONGEST):
            scores, state = self.model(codes, state)
            codes = scores[:, -1:].argmax(dim=2)
            if codes.item() == END:
                return
            yield codes.item()

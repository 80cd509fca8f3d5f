"""The image classifier that comes with the server, with its steps overlapping."""

from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.image_classifier import ImageClassifier


class PipelinedClassifier(ImageClassifier):
    """While the network looks at four photos, the next four are decoded."""

    topk = 1

    def initialize(self, context) -> None:
        """Puts the pipeline in the place of `handle`, as `model-config.yaml` says."""
        super().initialize(context)
        settings = self.model_yaml_config["handler"]["micro_batching"]
        self.handle = MicroBatching(self, **settings)

    def postprocess(self, data) -> list[dict]:
        """The best class of each photo, and which piece of the batch it was in."""
        piece = self.handle.get_micro_batch_idx()
        return [{"best": best, "piece": piece} for best in super().postprocess(data)]

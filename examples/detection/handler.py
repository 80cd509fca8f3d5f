"""The object detector that comes with the server, for a model that is never sure."""

from ts.torch_handler.object_detector import ObjectDetector


class AllObjects(ObjectDetector):
    """Answers what the model finds, however unlikely: its weights are random."""

    threshold = 0.0

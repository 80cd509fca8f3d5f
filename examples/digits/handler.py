"""The image classifier that comes with the server, for images as small as these."""

from torchvision import transforms
from ts.torch_handler.image_classifier import ImageClassifier


class DigitClassifier(ImageClassifier):
    """The three most probable digits of an image."""

    topk = 3
    # Decoding, batching, softmax, names and explanations are inherited.
    image_processing = transforms.Compose(
        [transforms.Grayscale(), transforms.Resize((8, 8)), transforms.ToTensor()]
    )
